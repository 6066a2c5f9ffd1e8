"""Summaries as runs leave them, without the runs."""

import dataclasses
from typing import Any

from optg.experiments.declaration import Run


def summary(run: Run, **given: Any) -> dict[str, Any]:
    made = {
        "recipe": run.recipe, "settings": dataclasses.asdict(run.plan.recipe), "method": run.plan.method,
        "options": run.options, "accuracy": 0.9, "sparsity": run.plan.recipe.sparsity, "flops": 25_000_000, "seconds": 120.0,
        "hardware": "a GPU", "versions": {"torch": "2.11"}, "command": f"optg {' '.join(run.arguments)}",
    }  # fmt: skip
    return made | given
