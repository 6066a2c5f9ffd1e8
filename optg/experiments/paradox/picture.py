"""Prediction and truth, drawn: a panel for each criterion, and one for the gap of single weights."""

import math
from collections.abc import Sequence
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from optg.experiments.paradox.measure import Row

matplotlib.use("Agg")

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#8c6d00", "#555555")  # told apart by colour-blind readers too


def draw(rows: Sequence[Row], what: str, steps: int, path: Path) -> None:
    names = list(dict.fromkeys(row.criterion for row in rows))
    across = -(-(len(names) + 2) // 2)  # two rows of the criteria, the gap and its legend
    down = -(-(len(names) + 1) // across)
    ticks = marks(rows)
    picture = Figure(figsize=(3.3 * across, 3.0 * down + 0.7), layout="constrained", facecolor="white")
    panels = picture.subplots(down, across, squeeze=False).flatten().tolist()
    for panel, name in zip(panels, names):
        mine = [row for row in rows if row.criterion == name]
        shares = [row.share for row in mine]
        curve(panel, shares, [row.predicted for row in mine], COLOURS[0], "--", "predicted, −Σ g·w")
        curve(panel, shares, [row.true for row in mine], COLOURS[1], "-", "true")
        tuned = [row.tuned for row in mine if row.tuned is not None]
        if tuned:
            curve(panel, shares, tuned, COLOURS[2], "-", f"true, rest trained {steps} steps")
        panel.set(title=name, ylabel="|change of the loss|")
    gap = panels[len(names)]
    for name, colour in zip(names, COLOURS):
        mine = [row for row in rows if row.criterion == name]
        gap.plot([row.share for row in mine], [seen(row.gap) for row in mine], "o-", color=colour, ms=3.5, label=name)
    gap.set(title="one weight: |Eq. 8 − Eq. 7|", ylabel="gap in the change of the loss")
    heights = [seen(v) for row in rows for v in (row.predicted, row.true, row.tuned) if v] or [1.0]
    for panel in panels[: len(names)]:
        panel.set(yscale="log", ylim=(min(heights) / 3, max(heights) * 3))
    for panel in panels[: len(names) + 1]:
        panel.set(xscale="logit", yscale="log", xlabel="weights removed at once")
        panel.xaxis.set_minor_locator(NullLocator())
        panel.set_xticks(list(ticks), labels=list(ticks.values()), fontsize=8)
        panel.grid(alpha=0.3)
        panel.spines[["top", "right"]].set_visible(False)
    for panel in panels[len(names) + 1 :]:
        panel.set_axis_off()
    if len(names) > 1:  # then a place is left
        panels[len(names) + 1].legend(*gap.get_legend_handles_labels(), frameon=False, fontsize=9, loc="upper left")
    handles, labels = panels[0].get_legend_handles_labels()
    picture.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False)
    marked = "filled: it rises, hollow: it falls, no mark: no change"
    picture.suptitle(f"{what}: what removal does to the loss ({marked})", fontsize=11)
    picture.savefig(path, dpi=150)


def marks(rows: Sequence[Row]) -> dict[float, str]:
    """Of the axis, which stretches both ends: counts where they are small, shares where they are large."""
    size = rows[0].removed / rows[0].share
    counts = {10**i / size: f"{10**i:,}" if i < 4 else f"$10^{i}$" for i in range(0, 12, 2) if 10**i < size / 10}
    return counts | {0.5: "50%", 0.9: "" if size > 1e6 else "90%", 0.99: "99%"}  # of a long axis there is less for each


def curve(panel: Axes, shares: list[float], values: list[float], colour: str, line: str, label: str) -> None:
    """Absolute values; markers tell the sign."""
    heights = [seen(value) for value in values]
    panel.plot(shares, heights, line, color=colour, label=label)
    faces = [colour if value > 0 else "white" for value in values]
    panel.scatter(shares, heights, c=faces, edgecolors=colour, s=18, zorder=3)


def seen(value: float) -> float:
    """As high as a logarithmic axis can show it, which no change at all is not."""
    return max(abs(value), 1e-16) if value else math.nan
