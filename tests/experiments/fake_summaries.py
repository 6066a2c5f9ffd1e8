"""Summaries like those of finished runs, made without training."""

import dataclasses
from typing import Any

from optg.experiments.planned_run import PlannedRun, run_key
from optg.experiments.records import Summaries


def fake_summary(run: PlannedRun, **changes: Any) -> dict[str, Any]:
    summary = {
        "recipe": run.recipe, "settings": dataclasses.asdict(run.plan.recipe), "method": run.plan.method,
        "options": run.options, "accuracy": 0.9, "sparsity": run.plan.recipe.sparsity, "flops": 25_000_000, "seconds": 120.0,
        "hardware": "a GPU", "versions": {"torch": "2.11"}, "command": f"optg {' '.join(run.arguments)}",
    }  # fmt: skip
    return summary | changes


def by_key(*summaries: dict[str, Any]) -> Summaries:
    return {run_key(summary): summary for summary in summaries}
