"""Which figures a group of runs has. Each function returns a figure, or None where no run recorded what it shows."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from optg.report.axes import Axis, linear, logarithmic
from optg.report.layers import densities
from optg.report.markup import brief, percent
from optg.report.palette import DASHES, Look, looks
from optg.report.paper import PaperTable, table_of
from optg.report.plot import MANY, Entry, Figure, Series
from optg.report.runs import Run


@dataclass
class Group:
    """Runs of one model on one dataset, with all that their figures share."""

    model: str
    data: str
    runs: list[Run]
    paper: PaperTable | None
    methods: dict[str, Look]
    looks: list[Look]  # of each run
    densities: list[dict[str, float]]  # of each run, by layer

    @property
    def name(self) -> str:
        return f"{self.model} on {self.data}"

    def others(self, runs: Iterable[int]) -> list[str]:
        shown = set(runs)
        return [run.label for i, run in enumerate(self.runs) if i not in shown]

    def legend(self, runs: Iterable[int]) -> list[Entry]:
        """Of lines: the runs by their labels, or where there are many, their methods."""
        if len(self.runs) <= MANY:
            return [(self.runs[i].label, self.looks[i], True, False) for i in runs]
        shown = {self.runs[i].method for i in runs}
        return [(name, look, True, False) for name, look in self.methods.items() if name in shown]


def make_group(model: str, data: str, runs: list[Run]) -> Group:
    paper = table_of(model, data)
    chosen = looks([run.method for run in runs], [point.method for point in (paper.points if paper else ())])
    earlier: dict[str, int] = {}
    apart = []
    for run in runs:
        variant = earlier.setdefault(run.method, 0)
        earlier[run.method] += 1
        look = chosen[run.method]
        apart.append(replace(look, dash=DASHES[variant % len(DASHES)]) if len(runs) <= MANY and variant else look)
    return Group(model, data, runs, paper, chosen, apart, [densities(run) for run in runs])


def curves(
    group: Group, name: str, title: str, key: str, make: Callable[[list[list[float]]], Axis], scale: float = 1.0
) -> Figure | None:
    """A column of the metrics over the epochs, one line for each run that recorded it."""
    found = {i: [(x, scale * y) for x, y in run.curve(key)] for i, run in enumerate(group.runs)}
    found = {i: points for i, points in found.items() if points}
    if not found:
        return None
    last = max(1, *(x for points in found.values() for x, _ in points))
    series = [Series(group.runs[i].label, group.looks[i], points) for i, points in found.items()]
    x = linear("epoch", [], low=0, high=last)
    y = make([[y for _, y in points] for points in found.values()])
    return Figure(name, title, x, y, series, group.legend(found), group.others(found))


def accuracy(group: Group) -> Figure | None:
    return curves(group, "accuracy", "Test accuracy", "accuracy", lambda v: linear("%", [], low=0, high=100), 100)


def late_accuracy(group: Group) -> Figure | None:
    """The last quarter of training, where the runs differ by little: of each run's own, short or long."""
    whole = curves(group, "accuracy-late", "Test accuracy, last quarter", "accuracy", lambda v: linear("%", joined(v)), 100)
    if whole is None:
        return None
    epochs = {run.label: max(1, run.settings["epochs"]) for run in group.runs}
    for series in whole.series:
        done = [(100 * x / epochs[series.label], y) for x, y in series.points]
        series.points = [(x, y) for x, y in done if x >= 75]
    whole.series = [series for series in whole.series if len(series.points) > 1]
    values = [y for series in whole.series for _, y in series.points]
    x = linear("% of training", [], low=75, high=100)
    return replace(whole, x=x, y=linear("%", values)) if values and max(epochs.values()) >= 8 else None


def joined(curves: list[list[float]]) -> list[float]:
    return [value for curve in curves for value in curve]


def loss(group: Group) -> Figure | None:
    return curves(group, "loss", "Training loss", "loss", lambda v: spread("loss", joined(v)))


def test_loss(group: Group) -> Figure | None:
    return curves(group, "test-loss", "Test loss", "test_loss", lambda v: spread("loss", joined(v)))


def spread(label: str, values: list[float]) -> Axis:
    """Logarithmic where values differ by more than a factor of 20."""
    positive = [value for value in values if value > 0]
    if positive and max(positive) > 20 * min(positive):
        return logarithmic(label, positive, lambda value: f"{value:g}")
    return linear(label, values, low=0)


def sparsity(group: Group) -> Figure | None:
    return curves(group, "sparsity", "Sparsity", "sparsity", lambda v: linear("%", [], low=0, high=100), 100)


def rate(group: Group) -> Figure | None:
    return curves(group, "rate", "Learning rate of the weights", "lr", lambda v: linear("rate", joined(v), low=0))


def mask_rate(group: Group) -> Figure | None:
    title = "Learning rate of the mask scores"
    return curves(group, "mask-rate", title, "score_lr", lambda v: linear("rate", joined(v), low=0))


def removed(group: Group) -> Figure | None:
    return curves(group, "removed", "Removed weights", "removed", lambda v: counts(joined(v)))


def revived(group: Group) -> Figure | None:
    return curves(group, "revived", "Revived weights", "revived", lambda v: counts(joined(v)))


def counts(values: list[float]) -> Axis:
    return logarithmic("weights per epoch", values, brief, zero=True)


def layer_density(group: Group) -> Figure | None:
    found = {i: list(kept.values()) for i, kept in enumerate(group.densities) if kept}
    if not found:
        return None
    series = [
        Series(
            group.runs[i].label, group.looks[i], [(j, 100 * value) for j, value in enumerate(values, 1)],
            markers=len(found) <= MANY and len(values) <= 30,
            notes=[f"{group.runs[i].label}: {layer} {percent(value)} %" for layer, value in group.densities[i].items()],
        )
        for i, values in found.items()
    ]  # fmt: skip
    everything = [100 * value for values in found.values() for value in values]
    y = logarithmic("% of the weights kept", [*everything, 100], lambda v: f"{v:g}", zero=min(everything) <= 0)
    longest = max(len(values) for values in found.values())
    return Figure(
        "layers", "Density of each layer", layer_numbers(longest), y, series, group.legend(found), group.others(found)
    )


def layer_numbers(count: int) -> Axis:
    """Whole numbers, from the first layer to the last."""
    axis = linear("layer", [], low=0.5, high=count + 0.5)
    every = next(step for step in (1, 2, 5, 10, 20, 50, 100, 1000) if count / step <= 10)
    marks = [1, *range(every, count + 1, every)] if every > 1 else list(range(1, count + 1))
    return replace(axis, ticks=[(axis.place(mark), str(mark)) for mark in marks])
