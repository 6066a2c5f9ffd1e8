"""Combine the finished runs of a cell into one accuracy, and format it beside the paper's."""

import math
import statistics
from dataclasses import dataclass, field
from typing import Any

from optg.experiments.declaration import Cell, Experiment
from optg.experiments.records import Summaries
from optg.report.paper import SAME

MAX_LOG_RATIO = math.log(2)  # a run counts if it keeps at least half and at most twice as many weights as the target
COLUMNS = (
    "dataset", "method", "setting", "ours", "paper", "difference", "sparsity", "MFLOPs", "training PFLOPs", "seeds", "seconds",
)  # fmt: skip


@dataclass
class CellResult:
    """A cell and the summaries of its finished runs."""

    cell: Cell
    summaries: list[dict[str, Any]] = field(default_factory=list)  # one for each seed
    too_far: list[dict[str, Any]] = field(default_factory=list)  # the closest ones, if none came close to the target sparsity

    def mean(self, key: str) -> float:
        return statistics.fmean(summary[key] for summary in self.summaries)

    def mean_if_recorded(self, key: str) -> float | None:
        """Return the mean, or None if an older version has recorded a run without this number."""
        return self.mean(key) if self.summaries and all(key in summary for summary in self.summaries) else None

    @property
    def accuracies(self) -> list[float]:
        """Return the accuracy of each seed in %: on validation images if the run held some out, else on test images."""
        return [100 * summary.get("validation", summary)["accuracy"] for summary in self.summaries]

    @property
    def accuracy(self) -> float:
        """Return the mean accuracy in %."""
        return statistics.fmean(self.accuracies)

    @property
    def deviation(self) -> float | None:
        """Return the standard deviation of the accuracy over seeds, or None for a single seed."""
        return statistics.stdev(self.accuracies) if len(self.summaries) > 1 else None

    @property
    def difference(self) -> float | None:
        """Return our accuracy minus the paper's, or None unless both models keep about as many weights."""
        paper = self.cell.paper
        if not paper or not self.summaries:
            return None
        kept_in_paper = 1 - self.cell.paper_sparsity / 100
        same = abs(1 - self.mean("sparsity") - kept_in_paper) <= SAME * kept_in_paper
        return self.accuracy - paper.accuracy if same else None


def pooled_deviation(results: list[CellResult]) -> float | None:
    """Return the standard deviation over seeds, pooled over the cells with several seeds; None if there is no such cell."""
    repeated = [result.accuracies for result in results if len(result.summaries) > 1]
    if not repeated:
        return None
    squares = sum((len(values) - 1) * statistics.variance(values) for values in repeated)
    return math.sqrt(squares / sum(len(values) - 1 for values in repeated))


def collect_results(experiment: Experiment, summaries: Summaries) -> list[CellResult]:
    return [cell_result(cell, summaries) for cell in experiment.cells]


def cell_result(cell: Cell, summaries: Summaries) -> CellResult:
    """Take one finished run for each seed: the one closest to the target sparsity, if it is close enough."""
    by_seed: dict[int, list[dict[str, Any]]] = {}
    for run in cell.runs:
        if run.key in summaries:
            by_seed.setdefault(run.plan.recipe.seed, []).append(summaries[run.key])

    def distance(summary: dict[str, Any]) -> float:
        return abs(math.log(max(1 - summary["sparsity"], 1e-9) / (1 - (cell.sparsity or 0.0))))

    closest = [min(found, key=distance) for found in by_seed.values()]
    close = [summary for summary in closest if distance(summary) < MAX_LOG_RATIO]
    return CellResult(cell, close, [] if close else closest)


def format_result(result: CellResult) -> list[str]:
    """Return the texts of a table row, in the order of COLUMNS."""
    cell, paper = result.cell, result.cell.paper
    theirs = "" if paper is None else f"{paper.accuracy:.2f}" + (f" at {paper.sparsity:g} %" if paper.sparsity else "")
    column = cell.column + (" %" if cell.sparsity and cell.column == f"{100 * cell.sparsity:g}" else "")
    if not result.summaries:
        reached = ", ".join(f"{100 * summary['sparsity']:.2f} %" for summary in result.too_far)
        return [cell.dataset, cell.row, column, "", theirs, "", f"too far: {reached}" if reached else "", *[""] * 4]
    deviation = "" if result.deviation is None else f" ± {result.deviation:.2f}"
    difference = "" if result.difference is None else f"{result.difference:+.2f}"
    flops = format_number(result.mean("flops") / 1e6)
    if all("shrunk" in summary for summary in result.summaries):
        flops += f" ({format_number(statistics.fmean(s['shrunk']['flops'] for s in result.summaries) / 1e6)} shrunk)"
    if paper and paper.flops:
        flops += f" (paper {format_number(paper.flops / 1e6)})"
    training = result.mean_if_recorded("training_flops")
    return [
        cell.dataset,
        cell.row,
        column,
        f"{result.accuracy:.2f}{deviation}",
        theirs,
        difference,
        f"{100 * result.mean('sparsity'):.2f} %",
        flops,
        "" if training is None else format_number(training / 1e15),
        ", ".join(str(s["settings"]["seed"]) for s in result.summaries),
        f"{result.mean('seconds'):,.0f}",
    ]


def format_number(value: float) -> str:
    """Format with at least three significant digits."""
    return f"{value:,.1f}" if value >= 10 else f"{value:#.3g}"


def informative_columns(rows: list[list[str]]) -> list[int]:
    """Return the indices of the columns to show: not the empty ones, nor the dataset if there is only one."""

    def informs(i: int) -> bool:
        values = {row[i] for row in rows}
        if COLUMNS[i] == "dataset":
            return len(values) > 1
        return COLUMNS[i] in ("method", "ours", "paper") or values != {""}

    return [i for i in range(len(COLUMNS)) if informs(i)]
