"""The plots of a group of runs. Each function returns a plot, or None if no run recorded the values."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from optg.report.layers import layer_densities
from optg.report.markup import axis_number, percent
from optg.report.palette import DASHES, Look, choose_looks
from optg.report.paper import PaperTable, find_table
from optg.report.plot import MAX_NAMED, LegendEntry, Plot, Series
from optg.report.runs import RunRecord
from optg.report.scales import TINY, Scale, layer_numbers, linear, logarithmic


@dataclass
class RunGroup:
    """Runs of one model on one dataset, with all that their plots share."""

    model: str
    data: str
    runs: list[RunRecord]
    paper: PaperTable | None
    methods: dict[str, Look]
    looks: list[Look]  # one per run
    densities: list[dict[str, float]]  # one per run: density of each layer

    @property
    def name(self) -> str:
        return f"{self.model} on {self.data}"

    @property
    def measured_on(self) -> str:
        """Return which images the accuracies and losses of the epochs were measured on."""
        kinds = {"Validation" if run.settings.get("validate") else "Test" for run in self.runs}
        return " or ".join(sorted(kinds)).capitalize()

    def labels_except(self, shown: Iterable[int]) -> list[str]:
        """Return the labels of the runs that a plot does not show."""
        hidden = set(range(len(self.runs))) - set(shown)
        return [self.runs[i].label for i in sorted(hidden)]

    def line_legend(self, shown: Iterable[int]) -> list[LegendEntry]:
        """Return an entry per run, or per method if there are many runs."""
        if len(self.runs) <= MAX_NAMED:
            return [LegendEntry(self.runs[i].label, self.looks[i], True, False) for i in shown]
        methods = {self.runs[i].method for i in shown}
        return [LegendEntry(name, look, True, False) for name, look in self.methods.items() if name in methods]


def make_run_group(model: str, data: str, runs: list[RunRecord]) -> RunGroup:
    """Choose the looks and read the layers. Up to 12 runs get dashes that tell runs of one method apart."""
    paper = find_table(model, data)
    methods = choose_looks([run.method for run in runs], [point.method for point in (paper.points if paper else ())])
    earlier: dict[str, int] = {}
    looks = []
    for run in runs:
        variant = earlier.setdefault(run.method, 0)
        earlier[run.method] += 1
        look = methods[run.method]
        looks.append(replace(look, dash=DASHES[variant % len(DASHES)]) if len(runs) <= MAX_NAMED and variant else look)
    return RunGroup(model, data, runs, paper, methods, looks, [layer_densities(run) for run in runs])


def plot_curves(
    group: RunGroup, name: str, title: str, key: str, make_scale: Callable[[list[float]], Scale], factor: float = 1.0
) -> Plot | None:
    """Plot a column of the metrics over the epochs, one line for each run that recorded it."""
    found = {i: [(x, factor * y) for x, y in run.curve(key)] for i, run in enumerate(group.runs)}
    found = {i: points for i, points in found.items() if points}
    if not found:
        return None
    last = max(1, *(x for points in found.values() for x, _ in points))
    series = [Series(group.runs[i].label, group.looks[i], points) for i, points in found.items()]
    y = make_scale([y for points in found.values() for _, y in points])
    return Plot(name, title, linear("epoch", low=0, high=last), y, series, group.line_legend(found), group.labels_except(found))


def percentages(values: list[float]) -> Scale:
    return linear("%", low=0, high=100)


def accuracy(group: RunGroup) -> Plot | None:
    return plot_curves(group, "accuracy", f"{group.measured_on} accuracy", "accuracy", percentages, 100)


def late_accuracy(group: RunGroup) -> Plot | None:
    """Plot the last quarter of each run's own training, where runs differ by little."""
    title = f"{group.measured_on} accuracy, last quarter"
    plot = plot_curves(group, "accuracy-late", title, "accuracy", percentages, 100)
    if plot is None:
        return None
    epochs = {run.label: max(1, run.settings["epochs"]) for run in group.runs}
    for series in plot.series:
        done = [(100 * x / epochs[series.label], y) for x, y in series.points]
        series.points = [(x, y) for x, y in done if x >= 75]
    plot.series = [series for series in plot.series if len(series.points) > 1]
    values = [y for series in plot.series for _, y in series.points]
    x = linear("% of training", low=75, high=100)
    return replace(plot, x=x, y=linear("%", values)) if values and max(epochs.values()) >= 8 else None


def loss(group: RunGroup) -> Plot | None:
    return plot_curves(group, "loss", "Training loss", "loss", losses)


def test_loss(group: RunGroup) -> Plot | None:
    return plot_curves(group, "test-loss", f"{group.measured_on} loss", "test_loss", losses)


def losses(values: list[float]) -> Scale:
    """Return a scale for losses, logarithmic if they differ by more than a factor of 20."""
    positive = [value for value in values if value > TINY]
    if positive and max(positive) > 20 * min(positive):
        return logarithmic("loss", positive, lambda value: f"{value:g}")
    return linear("loss", values, low=0)


def sparsity(group: RunGroup) -> Plot | None:
    return plot_curves(group, "sparsity", "Sparsity", "sparsity", percentages, 100)


def learning_rate(group: RunGroup) -> Plot | None:
    return plot_curves(group, "rate", "Learning rate of the weights", "lr", rates)


def score_rate(group: RunGroup) -> Plot | None:
    return plot_curves(group, "mask-rate", "Learning rate of the mask scores", "score_lr", rates)


def rates(values: list[float]) -> Scale:
    return linear("rate", values, low=0)


def removed(group: RunGroup) -> Plot | None:
    return plot_curves(group, "removed", "Removed weights", "removed", weight_counts)


def revived(group: RunGroup) -> Plot | None:
    return plot_curves(group, "revived", "Revived weights", "revived", weight_counts)


def weight_counts(values: list[float]) -> Scale:
    return logarithmic("weights per epoch", values, axis_number, zero=True)


def layer_density(group: RunGroup) -> Plot | None:
    found = {i: list(densities.values()) for i, densities in enumerate(group.densities) if densities}
    if not found:
        return None
    series = [
        Series(
            group.runs[i].label, group.looks[i], [(j, 100 * value) for j, value in enumerate(values, 1)],
            markers=len(found) <= MAX_NAMED and len(values) <= 30,
            notes=[f"{group.runs[i].label}: {layer} {percent(value)} %" for layer, value in group.densities[i].items()],
        )
        for i, values in found.items()
    ]  # fmt: skip
    everything = [100 * value for values in found.values() for value in values]
    x = layer_numbers(max(len(values) for values in found.values()))
    y = logarithmic("density, %", [*everything, 100], lambda value: f"{value:g}", zero=min(everything) <= 0)
    return Plot("layers", "Density of each layer", x, y, series, group.line_legend(found), group.labels_except(found))
