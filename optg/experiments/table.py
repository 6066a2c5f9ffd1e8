"""Our figures beside the paper's."""

import math
import statistics
from dataclasses import dataclass, field
from typing import Any

from rich.table import Table

from optg.experiments.declaration import Cell, Experiment
from optg.experiments.record import Summaries
from optg.report.paper import SAME

FAR = math.log(2)  # a run that keeps twice the wanted weights, or half of them, is no answer


@dataclass
class Line:
    """One cell with what its runs came to."""

    cell: Cell
    summaries: list[dict[str, Any]] = field(default_factory=list)  # one for each seed
    far: list[dict[str, Any]] = field(default_factory=list)  # where none came near the wanted sparsity: what came nearest

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
        """From the paper's, where as many weights are kept as there."""
        paper = self.cell.paper
        if not paper or not self.summaries:
            return None
        theirs = 1 - self.cell.paper_sparsity / 100
        return self.accuracy - paper.accuracy if abs(1 - self.mean("sparsity") - theirs) <= SAME * theirs else None


def lines(experiment: Experiment, known: Summaries) -> list[Line]:
    return [line_of(cell, known) for cell in experiment.cells]


def line_of(cell: Cell, known: Summaries) -> Line:
    """The run of each seed that has ended; of alternatives the one nearest to the wanted sparsity, if it is near at all."""
    seeds: dict[int, list[dict[str, Any]]] = {}
    for run in cell.runs:
        if run.key in known:
            seeds.setdefault(run.plan.recipe.seed, []).append(known[run.key])

    def distance(summary: dict[str, Any]) -> float:
        return abs(math.log(max(1 - summary["sparsity"], 1e-9) / (1 - (cell.sparsity or 0.0))))

    nearest = [min(found, key=distance) for found in seeds.values()]
    near = [summary for summary in nearest if distance(summary) < FAR]
    return Line(cell, near, [] if near else nearest)


COLUMNS = ("on", "what", "at", "ours", "paper", "difference", "sparsity", "MFLOPs", "seeds", "seconds")


def texts(line: Line) -> list[str]:
    """A line of the table, in the order of COLUMNS."""
    cell, paper = line.cell, line.cell.paper
    theirs = "" if paper is None else f"{paper.accuracy:.2f}" + (f" at {paper.sparsity:g} %" if paper.sparsity else "")
    column = cell.column + (" %" if cell.sparsity and cell.column == f"{100 * cell.sparsity:g}" else "")
    if not line.summaries:
        reached = ", ".join(f"{100 * summary['sparsity']:.2f} %" for summary in line.far)
        return [cell.place, cell.row, column, "", theirs, "", f"too far: {reached}" if reached else "", "", "", ""]
    spread = "" if line.deviation is None else f" ± {line.deviation:.2f}"
    difference = "" if line.difference is None else f"{line.difference:+.2f}"
    flops = f" (paper {number(paper.flops / 1e6)})" if paper and paper.flops else ""
    seeds = ", ".join(str(s["settings"]["seed"]) for s in line.summaries)
    return [
        cell.place, cell.row, column, f"{line.accuracy:.2f}{spread}", theirs, difference,
        f"{100 * line.mean('sparsity'):.2f} %", number(line.mean("flops") / 1e6) + flops, seeds, f"{line.mean('seconds'):,.0f}",
    ]  # fmt: skip


def number(value: float) -> str:
    """Three digits at least."""
    return f"{value:,.1f}" if value >= 10 else f"{value:#.3g}"


def used(rows: list[list[str]]) -> list[int]:
    """The columns that say something; where there is one place, it need not be said."""

    def says(i: int) -> bool:
        values = {row[i] for row in rows}
        return COLUMNS[i] in ("what", "ours", "paper") or (len(values) > 1 if COLUMNS[i] == "on" else values != {""})

    return [i for i in range(len(COLUMNS)) if says(i)]


def table(experiment: Experiment, known: Summaries) -> Table:
    rows = [texts(line) for line in lines(experiment, known)]
    made = Table(title=experiment.title, title_justify="left")
    keep = used(rows)
    for i in keep:
        made.add_column(COLUMNS[i], justify="left" if i < 3 else "right", overflow="fold")
    for row in rows:
        made.add_row(*(row[i] for i in keep))
    return made
