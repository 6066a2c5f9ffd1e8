"""Draw figures of experiments: the schedules, and accuracy against sparsity or FLOPs."""

import itertools
import math
import textwrap
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from optg.core.clock import Clock
from optg.core.schedules import sigmoid
from optg.experiments.cell_results import CellResult, collect_results
from optg.experiments.declaration import Experiment
from optg.experiments.records import Summaries
from optg.methods import METHODS, OptG

matplotlib.use("Agg")

COLORS = ("#d55e00", "#0072b2", "#009e73", "#cc79a7", "#8c6d00", "#7b3fa0", "#000000")  # distinct for colour-blind readers
GREY = "#666666"
FLOPS = {  # what accuracy is drawn against, besides sparsity: the number in a run's summary, its unit, and the axis
    "flops": ("flops", 1e6, "MFLOPs for one image, zeros skipped"),
    "training-flops": ("training_flops", 1e15, "PFLOPs of the whole training, zeros skipped"),
}


def draw_schedules(curves: dict[str, Any], folder: Path) -> Path:
    """Draw Figure 2: Eq. 15 and Eq. 16 at the start of every epoch, for several α."""
    epochs = curves["epochs"]
    figure = Figure(figsize=(9, 3.4), layout="constrained")
    left, right = figure.subplots(1, 2)
    ks = range(1, epochs + 1)
    weight_lr = [curves["lr"] * (1 + math.cos(math.pi * (k - 1) / epochs)) / 2 for k in ks]
    for alpha in curves["alpha"]:
        share = [sigmoid(Clock(epochs, 1, k - 1), 0.0, 1.0, alpha) for k in ks]
        factor = [OptG(alpha=alpha).rate_at(Clock(epochs, 1, k - 1)) for k in ks]
        left.plot(ks, [100 * curves["sparsity"] * s for s in share], label=f"α = {alpha:g}")
        right.plot(ks, [lr * f for lr, f in zip(weight_lr, factor)], label=f"α = {alpha:g}")
    right.plot(ks, weight_lr, color="0.6", linestyle=":", label="of the weights")
    left.set(xlabel="epoch k", ylabel="sparsity (%)", title="(a) Eq. 15")
    right.set(xlabel="epoch k", ylabel="learning rate of the scores", title="(b) Eq. 16")
    for axes in figure.axes:
        axes.legend(frameon=False)
    return save(figure, folder / "schedules.png")


def draw_accuracy(experiment: Experiment, summaries: Summaries, path: Path, against: str = "sparsity") -> Path | None:
    """Draw accuracy against sparsity: a line for each row, a dashed line for the dense model, crosses for the paper's figures.

    Points are means over seeds and error bars are standard deviations. Return None if no sparse run has finished. `against` may
    also be "flops" or "training-flops"; then there are no crosses.
    """
    results = collect_results(experiment, summaries)
    lines: dict[tuple[str, str], list[CellResult]] = {}
    for result in results:
        if result.cell.sparsity is not None and horizontal(result, against) is not None:
            lines.setdefault((result.cell.dataset, result.cell.row), []).append(result)
    if not lines:
        return None
    figure = Figure(figsize=(8, 4.6), layout="constrained", facecolor="white")
    axes = figure.subplots()
    axes.margins(x=0.03)
    several_datasets = len({dataset for dataset, _ in lines}) > 1
    labels = []
    styles = itertools.cycle(itertools.product(("-", ":"), COLORS))
    for points, (dashes, color) in zip(lines.values(), styles):
        draw_line(axes, sorted_points(points, against), color, dashes, against)
        label = display_name(points[0]) + (f", {points[0].cell.dataset}" if several_datasets else "")
        labels.append((sorted_points(points, against)[-1].accuracy, label, color))
    for result in results:
        if result.cell.sparsity is None and result.summaries:
            axes.axhline(result.accuracy, color=GREY, linestyle="--", linewidth=1.2)
            labels.append((result.accuracy, f"Dense ({result.accuracy:.1f} %)", GREY))
    drawn = [result for points in lines.values() for result in points]
    if against == "sparsity":
        label_sparsities(axes, drawn)
    else:
        axes.set_xscale("log")
        axes.set_xlabel(FLOPS[against][2])
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.xaxis.set_minor_locator(NullLocator())
    label_lines(axes, labels)
    held_out = any("validation" in summary for result in drawn for summary in result.summaries)
    axes.set_ylabel(f"{'validation' if held_out else 'test'} accuracy (%)")
    axes.set_title(experiment.title, loc="left", fontsize=12, fontweight="bold")
    figure.supxlabel(explain_marks(drawn, crosses=against == "sparsity"), fontsize=8.5, color=GREY)
    return save(figure, path)


def horizontal(result: CellResult, against: str) -> float | None:
    """Return the horizontal position of a cell; None if it has no finished run, or none that recorded this number."""
    if against == "sparsity":
        return position(result.mean("sparsity")) if result.summaries else None
    key, unit, _ = FLOPS[against]
    value = result.mean_if_recorded(key)
    return None if value is None else value / unit


def sorted_points(points: list[CellResult], against: str) -> list[CellResult]:
    return sorted(points, key=lambda point: horizontal(point, against) or 0.0)


def draw_line(axes: Axes, points: list[CellResult], color: str, dashes: str, against: str) -> None:
    """Draw one row, and the paper's figures in the same colour."""
    x, y = [horizontal(point, against) or 0.0 for point in points], [point.accuracy for point in points]
    axes.plot(x, y, "o", linestyle=dashes, color=color, linewidth=1.8, markersize=4.5)
    repeated = [(px, py, point.deviation) for px, py, point in zip(x, y, points) if point.deviation is not None]
    if repeated:
        bar_x, bar_y, deviations = zip(*repeated)
        axes.errorbar(bar_x, bar_y, deviations, fmt="none", ecolor=color, elinewidth=1.2, capsize=3)
    for point in points:
        if point.cell.paper and against == "sparsity":
            axes.plot(position(point.cell.paper_sparsity / 100), point.cell.paper.accuracy, "x", color=color)


def position(sparsity: float) -> float:
    """Return the horizontal position: each halving of the kept weights is one unit to the right."""
    return -math.log2(max(1 - sparsity, 1e-9))


def display_name(result: CellResult) -> str:
    """Return the row's label, with its method spelled as in the paper."""
    method = result.cell.runs[0].plan.method
    name = METHODS[method].__name__
    return name + result.cell.row.removeprefix(method) if result.cell.row.startswith(method) else result.cell.row


def label_sparsities(axes: Axes, results: list[CellResult]) -> None:
    """Mark the target sparsities on the x axis, with the share of weights that they keep."""
    targets = sorted({result.cell.sparsity for result in results if result.cell.sparsity is not None})
    texts = [f"{100 * target:g} %\n1 in {1 / (1 - target):.0f} kept" for target in targets]
    axes.set_xticks([position(target) for target in targets], texts)
    axes.set_xlabel("sparsity (share of weights removed)")
    axes.xaxis.set_minor_locator(NullLocator())


def label_lines(axes: Axes, labels: list[tuple[float, str, str]]) -> None:
    """Write the name of each line to the right of its last point, far enough apart to be read."""
    low, high = axes.get_ylim()
    line_height = 0.048 * (high - low)
    right = axes.get_xlim()[1]
    lowest_free = low
    for accuracy, label, color in sorted(labels):
        text = textwrap.fill(label, 26)
        half = line_height * (text.count("\n") + 1) / 2
        center = max(accuracy, lowest_free + half)
        lowest_free = center + half
        axes.annotate(
            text, (right, center), xytext=(6, 0), textcoords="offset points", va="center", color=color, fontsize=10,
            annotation_clip=False,
        )  # fmt: skip


def explain_marks(results: list[CellResult], crosses: bool = True) -> str:
    """Return a footnote on the error bars, and on the crosses if there are any."""
    counts = sorted({len(result.summaries) for result in results} - {1})
    repeated = list(dict.fromkeys(display_name(result) for result in results if len(result.summaries) > 1))
    note = f"Error bars: standard deviation over {' or '.join(map(str, counts))} seeds" if counts else "One seed for each point"
    if counts and len(repeated) < len({result.cell.row for result in results}):
        note += f" ({'; '.join(repeated)}); other lines: one seed"
    crosses = crosses and any(result.cell.paper for result in results)
    return note + (". Crosses: the paper's accuracy." if crosses else ".")


def save(figure: Figure, path: Path) -> Path:
    for axes in figure.axes:
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context({"svg.hashsalt": "optg"}):  # the same picture gives the same SVG file
        figure.savefig(path, dpi=150, metadata={"Date": None} if path.suffix == ".svg" else None)
    return path
