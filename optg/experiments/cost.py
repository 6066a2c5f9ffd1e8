"""What runs will cost, from what runs have cost."""

import statistics
from collections.abc import Iterable
from typing import Any

from optg.experiments.declaration import Run


class Cost:
    """Seconds of an epoch, by what they depend on most."""

    def __init__(self, summaries: Iterable[dict[str, Any]]) -> None:
        seconds: dict[tuple[Any, ...], list[float]] = {}
        for summary in summaries:
            settings = summary["settings"]
            each = summary["seconds"] / settings["epochs"]
            for key in keys(settings, summary["method"]):
                seconds.setdefault(key, []).append(each)
        self.seconds = {key: statistics.fmean(values) for key, values in seconds.items()}

    def of(self, run: Run) -> float | None:
        """Seconds, or None where nothing like it was measured."""
        settings = vars(run.plan.recipe) | ({"model": run.needs.plan.recipe.model} if run.needs else {})
        each = next((self.seconds[key] for key in keys(settings, run.plan.method) if key in self.seconds), None)
        return None if each is None else each * settings["epochs"]

    def text(self, runs: list[Run]) -> str:
        costs = [self.of(run) for run in runs]
        return "unknown" if None in costs else f"{sum(c for c in costs if c is not None) / 3600:.1f}"


def keys(settings: dict[str, Any], method: str) -> list[tuple[Any, ...]]:
    """From the most alike to the least: the method matters less than what it trains."""
    size = "cifar" if settings["data"].startswith("cifar") else settings["data"]  # as many images of one size
    what = (settings["model"], size, settings["batch_size"])
    return [(*what, method), what, what[:2]]
