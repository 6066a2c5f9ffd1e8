"""Our figures beside the paper's."""

import math
import statistics
from dataclasses import dataclass, field
from typing import Any

from rich.table import Table

from optg.experiments.declaration import Cell, Experiment
from optg.experiments.record import Summaries


@dataclass
class Line:
    """One cell with what its runs came to."""

    cell: Cell
    summaries: list[dict[str, Any]] = field(default_factory=list)  # one for each seed

    def mean(self, key: str) -> float:
        return statistics.fmean(summary[key] for summary in self.summaries)

    @property
    def accuracy(self) -> float:
        """In %."""
        return 100 * self.mean("accuracy")

    @property
    def deviation(self) -> float | None:
        return statistics.stdev(100 * s["accuracy"] for s in self.summaries) if len(self.summaries) > 1 else None

    @property
    def difference(self) -> float | None:
        return self.accuracy - self.cell.paper.accuracy if self.cell.paper and self.summaries else None


def lines(experiment: Experiment, known: Summaries) -> list[Line]:
    return [Line(cell, chosen(cell, known)) for cell in experiment.cells]


def chosen(cell: Cell, known: Summaries) -> list[dict[str, Any]]:
    """The run of each seed that has ended; of alternatives the one nearest to the wanted sparsity, in kept weights."""
    seeds: dict[int, list[dict[str, Any]]] = {}
    for run in cell.runs:
        if run.key in known:
            seeds.setdefault(run.plan.recipe.seed, []).append(known[run.key])

    def distance(summary: dict[str, Any]) -> float:
        return abs(math.log(max(1 - summary["sparsity"], 1e-9) / (1 - (cell.sparsity or 0.0))))

    return [min(found, key=distance) for found in seeds.values()]


COLUMNS = ("on", "row", "column", "ours", "paper", "difference", "sparsity", "MFLOPs", "seeds", "seconds")


def texts(line: Line) -> list[str]:
    """A line of the table, in the order of COLUMNS."""
    cell, paper = line.cell, line.cell.paper
    theirs = "" if paper is None else f"{paper.accuracy:.2f}" + (f" at {paper.sparsity:g} %" if paper.sparsity else "")
    column = cell.column + (" %" if cell.sparsity and cell.column == f"{100 * cell.sparsity:g}" else "")
    if not line.summaries:
        return [cell.place, cell.row, column, "", theirs, "", "", "", "", ""]
    spread = "" if line.deviation is None else f" ± {line.deviation:.2f}"
    difference = "" if line.difference is None else f"{line.difference:+.2f}"
    seeds = ", ".join(str(s["settings"]["seed"]) for s in line.summaries)
    return [
        cell.place, cell.row, column, f"{line.accuracy:.2f}{spread}", theirs, difference,
        f"{100 * line.mean('sparsity'):.2f} %", f"{line.mean('flops') / 1e6:,.1f}", seeds, f"{line.mean('seconds'):,.0f}",
    ]  # fmt: skip


def used(experiment: Experiment, rows: list[list[str]]) -> list[int]:
    """The columns that say something."""
    return [i for i, name in enumerate(COLUMNS) if name in ("row", "ours", "paper") or any(row[i] for row in rows)]


def table(experiment: Experiment, known: Summaries) -> Table:
    rows = [texts(line) for line in lines(experiment, known)]
    made = Table(title=experiment.title, title_justify="left", caption="\n".join(experiment.notes), caption_justify="left")
    keep = used(experiment, rows)
    for i in keep:
        made.add_column(COLUMNS[i], justify="left" if i < 3 else "right")
    for row in rows:
        made.add_row(*(row[i] for i in keep))
    return made
