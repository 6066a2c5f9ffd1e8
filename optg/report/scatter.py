"""Results as points: accuracy against sparsity and against FLOPs, ours filled, the paper's hollow."""

import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace

from optg.report.axes import Axis, linear, logarithmic, sparsities
from optg.report.figures import Group
from optg.report.markup import brief, is_number, percent, share
from optg.report.palette import Look
from optg.report.paper import Point
from optg.report.plot import Entry, Figure, Series
from optg.report.runs import Run, all_settings

FAR = 8  # times as far below the median as the upper quarter is above it, and at least 32 points: such runs have collapsed


@dataclass(frozen=True)
class Dot:
    run: Run
    x: float
    y: float


def against_sparsity(group: Group) -> Figure | None:
    return scatter(
        group, "accuracy-sparsity", "Accuracy against sparsity", lambda run: run.sparsity, lambda point: point.sparsity,
        lambda values: sparsities("sparsity, %", values),
    )  # fmt: skip


def against_flops(group: Group) -> Figure | None:
    return scatter(
        group, "accuracy-flops", "Accuracy against FLOPs", lambda run: run.number("flops"), lambda point: point.flops,
        lambda values: logarithmic("FLOPs for one image", [0.8 * min(values), 1.25 * max(values)], brief),
    )  # fmt: skip


def scatter(
    group: Group,
    name: str,
    title: str,
    ours: Callable[[Run], float | None],
    theirs: Callable[[Point], float | None],
    make: Callable[[list[float]], Axis],
) -> Figure | None:
    """A dot for each run that ended with an accuracy."""
    dots = [
        Dot(run, x, 100 * run.accuracy)
        for run in group.runs
        if run.finished and is_number(x := ours(run)) and is_number(run.accuracy)
    ]
    if not dots:
        return None
    printed = [(point, x) for point in (group.paper.points if group.paper else ()) if is_number(x := theirs(point))]
    lowest = floor([dot.y for dot in dots] + [100 * point.accuracy for point, _ in printed])
    shown = [dot for dot in dots if dot.y >= lowest]
    series = [*lines(group, dots, lowest), *filled(group, shown), *hollow(group, printed)]
    places = [place for one in series for place in one.points]
    across, up = make([x for x, _ in places]), linear("test accuracy, %", [y for _, y in places])
    ended = [dot.run.label for dot in dots]
    missing = [run.label for run in group.runs if run.label not in ended]
    return Figure(
        name, title, across, up, series, legend(group, shown, printed), missing,
        below=[f"{dot.run.label} ({dot.y:.2f} %)" for dot in dots if dot.y < lowest], height=300,
    )  # fmt: skip


def floor(values: list[float]) -> float:
    """Below this a run is so far from the others that it would press them into one line."""
    if len(values) < 4:
        return min(values)
    _, median, third = statistics.quantiles(values, n=4)
    return median - FAR * max(third - median, 4.0)


def lines(group: Group, dots: list[Dot], lowest: float) -> list[Series]:
    """Through the runs that differ in sparsity and seed alone: their means, also over seeds that are not drawn."""
    alike: dict[tuple[str, str], list[Dot]] = {}
    for dot in dots:
        same = {key: value for key, value in all_settings(dot.run).items() if key not in ("sparsity", "seed")}
        alike.setdefault((dot.run.method, repr(same)), []).append(dot)
    made = [
        Series(method, group.methods[method], [(x, y) for x, y in means(found) if y >= lowest])
        for (method, _), found in alike.items()
    ]
    return [series for series in made if len(series.points) > 1]


def means(dots: list[Dot]) -> list[tuple[float, float]]:
    """One place for each sparsity that was asked for: the mean over the seeds."""
    targets = sorted({dot.run.target for dot in dots})
    at = [[dot for dot in dots if dot.run.target == target] for target in targets]
    return [(statistics.fmean(dot.x for dot in same), statistics.fmean(dot.y for dot in same)) for same in at]


def filled(group: Group, dots: list[Dot]) -> list[Series]:
    made = []
    for method in dict.fromkeys(dot.run.method for dot in dots):
        found = [dot for dot in dots if dot.run.method == method]
        notes = [f"{dot.run.label}: {dot.y:.2f} %" for dot in found]
        places = [(dot.x, dot.y) for dot in found]
        made.append(Series(method, group.methods[method], places, line=False, markers=True, notes=notes))
    return made


def hollow(group: Group, printed: list[tuple[Point, float]]) -> list[Series]:
    made = []
    for point, x in printed:
        look = replace(group.methods[point.method], hollow=True)
        note = f"paper, {point.method} {share(point.sparsity)}: {percent(point.accuracy)} %"
        made.append(Series(note, look, [(x, 100 * point.accuracy)], line=False, markers=True, notes=[note]))
    return made


def legend(group: Group, dots: list[Dot], printed: list[tuple[Point, float]]) -> list[Entry]:
    """Our methods, those that only the paper has, and what hollow means."""
    ours, theirs = {dot.run.method for dot in dots}, {point.method for point, _ in printed}
    entries = [(method, look, False, True) for method, look in group.methods.items() if method in ours]
    for method, look in group.methods.items():
        if method in theirs - ours:
            entries.append((f"{method}, paper only", replace(look, hollow=True), False, True))
    return [*entries, ("hollow: the paper's", Look("quiet", hollow=True), False, True)] if printed else entries
