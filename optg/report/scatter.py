"""Accuracy against sparsity and against FLOPs: runs as filled markers, results of the paper as hollow ones."""

import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace

from optg.report.figures import RunGroup
from optg.report.markup import axis_number, is_number, percent, sparsity_label
from optg.report.palette import QUIET, Look
from optg.report.paper import PaperPoint
from optg.report.plot import LegendEntry, Plot, Point, Series
from optg.report.runs import RunRecord, all_settings
from optg.report.scales import Scale, linear, logarithmic, sparsities

# A run has collapsed if it is this many times farther below the median than the upper quartile is above it, and at least 32
# percentage points.
FAR = 8


@dataclass(frozen=True)
class Dot:
    run: RunRecord
    x: float
    y: float


def against_sparsity(group: RunGroup) -> Plot | None:
    return scatter_plot(
        group, "accuracy-sparsity", "Accuracy against sparsity", lambda run: run.sparsity, lambda point: point.sparsity,
        lambda values: sparsities("sparsity, %", values),
    )  # fmt: skip


def against_flops(group: RunGroup) -> Plot | None:
    return scatter_plot(
        group, "accuracy-flops", "Accuracy against FLOPs", lambda run: run.number("flops"), lambda point: point.flops,
        lambda values: logarithmic("FLOPs for one image", [0.8 * min(values), 1.25 * max(values)], axis_number),
    )  # fmt: skip


def scatter_plot(
    group: RunGroup,
    name: str,
    title: str,
    x_of_run: Callable[[RunRecord], float | None],
    x_of_point: Callable[[PaperPoint], float | None],
    make_scale: Callable[[list[float]], Scale],
) -> Plot | None:
    """Plot a dot for each finished run that has an accuracy."""
    dots = [
        Dot(run, x, 100 * run.accuracy)
        for run in group.runs
        if run.finished and is_number(x := x_of_run(run)) and is_number(run.accuracy)
    ]
    if not dots:
        return None
    paper = [(point, x) for point in (group.paper.points if group.paper else ()) if is_number(x := x_of_point(point))]
    lowest = collapse_limit([dot.y for dot in dots] + [100 * point.accuracy for point, _ in paper])
    shown = [dot for dot in dots if dot.y >= lowest]
    series = [*lines(group, dots, lowest), *run_markers(group, shown), *paper_markers(group, paper)]
    points = [point for one in series for point in one.points]
    x_scale, y_scale = make_scale([x for x, _ in points]), linear("test accuracy, %", [y for _, y in points])
    drawn = [dot.run.label for dot in dots]
    missing = [run.label for run in group.runs if run.label not in drawn]
    return Plot(
        name, title, x_scale, y_scale, series, legend(group, shown, paper), missing,
        below=[f"{dot.run.label} ({dot.y:.2f} %)" for dot in dots if dot.y < lowest], height=300,
    )  # fmt: skip


def collapse_limit(values: list[float]) -> float:
    """Return the accuracy below which a run counts as collapsed. Drawing it would squeeze all others into one line."""
    if len(values) < 4:
        return min(values)
    _, median, third = statistics.quantiles(values, n=4)
    return median - FAR * max(third - median, 4.0)


def lines(group: RunGroup, dots: list[Dot], lowest: float) -> list[Series]:
    """Return lines through the means of runs that differ only in sparsity and seed. Collapsed seeds count in the means."""
    alike: dict[tuple[str, str], list[Dot]] = {}
    for dot in dots:
        same = {key: value for key, value in all_settings(dot.run).items() if key not in ("sparsity", "seed")}
        alike.setdefault((dot.run.method, repr(same)), []).append(dot)
    joined = [
        Series(method, group.methods[method], [(x, y) for x, y in means(found) if y >= lowest])
        for (method, _), found in alike.items()
    ]
    return [series for series in joined if len(series.points) > 1]


def means(dots: list[Dot]) -> list[Point]:
    """Return the mean over seeds for each requested sparsity."""
    targets = sorted({dot.run.target for dot in dots})
    at = [[dot for dot in dots if dot.run.target == target] for target in targets]
    found = [same for same in at if same]  # a sparsity of NaN, in a forged summary, equals nothing
    return [(statistics.fmean(dot.x for dot in same), statistics.fmean(dot.y for dot in same)) for same in found]


def run_markers(group: RunGroup, dots: list[Dot]) -> list[Series]:
    markers = []
    for method in dict.fromkeys(dot.run.method for dot in dots):
        found = [dot for dot in dots if dot.run.method == method]
        notes = [f"{dot.run.label}: {dot.y:.2f} %" for dot in found]
        points = [(dot.x, dot.y) for dot in found]
        markers.append(Series(method, group.methods[method], points, line=False, markers=True, notes=notes))
    return markers


def paper_markers(group: RunGroup, paper: list[tuple[PaperPoint, float]]) -> list[Series]:
    markers = []
    for point, x in paper:
        look = replace(group.methods[point.method], hollow=True)
        note = f"paper, {point.method} {sparsity_label(point.sparsity)}: {percent(point.accuracy)} %"
        markers.append(Series(note, look, [(x, 100 * point.accuracy)], line=False, markers=True, notes=[note]))
    return markers


def legend(group: RunGroup, dots: list[Dot], paper: list[tuple[PaperPoint, float]]) -> list[LegendEntry]:
    """Return entries for our methods, for methods that only the paper has, and for the meaning of hollow markers."""
    ours, papers = {dot.run.method for dot in dots}, {point.method for point, _ in paper}
    entries = [LegendEntry(method, look, False, True) for method, look in group.methods.items() if method in ours]
    for method, look in group.methods.items():
        if method in papers - ours:
            entries.append(LegendEntry(f"{method}, paper only", replace(look, hollow=True), False, True))
    return [*entries, LegendEntry("hollow: the paper", Look(QUIET[0], hollow=True), False, True)] if paper else entries
