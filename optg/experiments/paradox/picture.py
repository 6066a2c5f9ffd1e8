"""Draw predicted and true changes of the loss, a panel for each criterion, and the gap of single weights in the last panel."""

import math
from collections.abc import Sequence
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from optg.experiments.paradox.measure import Row

matplotlib.use("Agg")

COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#8c6d00", "#555555")  # distinct for color-blind readers


def draw_paradox(rows: Sequence[Row], what: str, steps: int, path: Path) -> None:
    names = list(dict.fromkeys(row.criterion for row in rows))
    across = -(-(len(names) + 2) // 2)  # two rows of panels: the criteria, the gap and its legend
    down = -(-(len(names) + 1) // across)
    ticks = share_ticks(rows)
    figure = Figure(figsize=(3.3 * across, 3.0 * down + 0.7), layout="constrained", facecolor="white")
    panels = figure.subplots(down, across, squeeze=False).flatten().tolist()
    for panel, name in zip(panels, names):
        mine = [row for row in rows if row.criterion == name]
        shares = [row.share for row in mine]
        draw_changes(panel, shares, [row.predicted for row in mine], COLORS[0], "--", "predicted, −Σ g·w")
        draw_changes(panel, shares, [row.true for row in mine], COLORS[1], "-", "true")
        tuned = [row.tuned for row in mine if row.tuned is not None]
        if tuned:
            draw_changes(panel, shares, tuned, COLORS[2], "-", f"true, after {steps} training steps")
        panel.set(title=name, ylabel="|change of loss|")
    gap = panels[len(names)]
    for name, color in zip(names, COLORS):
        mine = [row for row in rows if row.criterion == name]
        gap.plot([row.share for row in mine], [log_height(row.gap) for row in mine], "o-", color=color, ms=3.5, label=name)
    gap.set(title="one weight: |Eq. 8 − Eq. 7|", ylabel="gap in the change of loss")
    heights = [log_height(v) for row in rows for v in (row.predicted, row.true, row.tuned) if v] or [1.0]
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
    if len(names) > 1:  # then a panel is free
        panels[len(names) + 1].legend(*gap.get_legend_handles_labels(), frameon=False, fontsize=9, loc="upper left")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False)
    signs = "filled: loss rises, hollow: loss falls, no marker: no change"
    figure.suptitle(f"{what}: how removing weights changes the loss ({signs})", fontsize=11)
    figure.savefig(path, dpi=150)


def share_ticks(rows: Sequence[Row]) -> dict[float, str]:
    """Return tick positions and labels of the logit axis: counts at its low end, shares at its high end."""
    size = rows[0].removed / rows[0].share
    counts = {10**i / size: f"{10**i:,}" if i < 4 else f"$10^{i}$" for i in range(0, 12, 2) if 10**i < size / 10}
    return counts | {0.5: "50%", 0.9: "" if size > 1e6 else "90%", 0.99: "99%"}  # a long axis has no room for 90 %


def draw_changes(panel: Axes, shares: list[float], values: list[float], color: str, line: str, label: str) -> None:
    """Draw absolute values. Filled markers are positive, hollow ones negative."""
    heights = [log_height(value) for value in values]
    panel.plot(shares, heights, line, color=color, label=label)
    faces = [color if value > 0 else "white" for value in values]
    panel.scatter(shares, heights, c=faces, edgecolors=color, s=18, zorder=3)


def log_height(value: float) -> float:
    """Return the height on a logarithmic axis; NaN, which is not drawn, for no change."""
    return max(abs(value), 1e-16) if value else math.nan
