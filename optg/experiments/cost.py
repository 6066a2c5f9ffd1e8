"""Estimate what planned runs will cost from what finished runs have cost."""

import statistics
from collections.abc import Iterable
from typing import Any

from optg.experiments.planned_run import PlannedRun


class CostEstimate:
    """Mean seconds per epoch of finished runs, looked up by the most similar model, data, batch size and method."""

    def __init__(self, summaries: Iterable[dict[str, Any]]) -> None:
        measured: dict[tuple[Any, ...], list[float]] = {}
        for summary in summaries:
            settings = summary["settings"]
            for key in similarity_keys(settings, summary["method"]):
                measured.setdefault(key, []).append(summary["seconds"] / settings["epochs"])
        self.seconds_per_epoch = {key: statistics.fmean(values) for key, values in measured.items()}

    def seconds(self, run: PlannedRun) -> float | None:
        """Return the estimated seconds, or None if no similar run has finished."""
        settings = vars(run.plan.recipe) | ({"model": run.starts_from.plan.recipe.model} if run.starts_from else {})
        keys = similarity_keys(settings, run.plan.method)
        per_epoch = next((self.seconds_per_epoch[key] for key in keys if key in self.seconds_per_epoch), None)
        return None if per_epoch is None else per_epoch * settings["epochs"]

    def hours(self, runs: list[PlannedRun]) -> str:
        """Return the estimated hours of all runs as text, or "unknown"."""
        seconds = [self.seconds(run) for run in runs]
        return "unknown" if None in seconds else f"{sum(s for s in seconds if s is not None) / 3600:.1f}"


def similarity_keys(settings: dict[str, Any], method: str) -> list[tuple[Any, ...]]:
    """Return lookup keys from the most to the least specific. The method matters less than the model and the data."""
    data = "cifar" if settings["data"].startswith("cifar") else settings["data"]  # both CIFARs cost the same
    trained = (settings["model"], data, settings["batch_size"])
    return [(*trained, method), trained, trained[:2]]
