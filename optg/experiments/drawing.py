"""The paper's figures that are curves."""

import math
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure as Picture

from optg.core.clock import Clock
from optg.core.schedules import sigmoid
from optg.experiments.declaration import Experiment
from optg.experiments.record import Summaries
from optg.experiments.table import lines
from optg.methods import OptG

matplotlib.use("Agg")


def draw_schedules(curves: dict[str, Any], folder: Path) -> Path:
    """Fig. 2: Eq. 15 and Eq. 16 at the start of every epoch, for several α."""
    epochs = curves["epochs"]
    picture = Picture(figsize=(9, 3.4), layout="constrained")
    left, right = picture.subplots(1, 2)
    ks = range(1, epochs + 1)
    for alpha in curves["alpha"]:
        rising = [sigmoid(Clock(epochs, 1, k - 1), 0.0, 1.0, alpha) for k in ks]
        factor = [OptG(alpha=alpha).rate_at(Clock(epochs, 1, k - 1)) for k in ks]
        weight = [curves["lr"] * (1 + math.cos(math.pi * (k - 1) / epochs)) / 2 for k in ks]
        left.plot(ks, [100 * curves["sparsity"] * share for share in rising], label=f"α = {alpha:g}")
        right.plot(ks, [η * share for η, share in zip(weight, factor)], label=f"α = {alpha:g}")
    right.plot(ks, weight, color="0.6", linestyle=":", label="of the weights")
    left.set(xlabel="epoch k", ylabel="sparsity (%)", title="(a) Eq. 15")
    right.set(xlabel="epoch k", ylabel="learning rate of the scores", title="(b) Eq. 16")
    return finish(picture, folder / "schedules.png")


def draw_accuracy(experiment: Experiment, known: Summaries, folder: Path) -> Path | None:
    """Fig. 1: accuracy against sparsity, ours as lines and the paper's as crosses of the same colour."""
    rows: dict[tuple[str, str], list[tuple[float, float]]] = {}
    theirs: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for line in lines(experiment, known):
        where, paper = (line.cell.place, line.cell.row), line.cell.paper
        if line.summaries:
            rows.setdefault(where, []).append((100 * line.mean("sparsity"), line.accuracy))
        if paper:
            theirs.setdefault(where, []).append((line.cell.paper_sparsity, paper.accuracy))
    if not rows:
        return None
    picture = Picture(figsize=(6, 4.2), layout="constrained")
    axes = picture.subplots()
    for (place, row), points in rows.items():
        (drawn,) = axes.plot(*zip(*sorted(set(points))), marker="o", label=f"{row}, {place}")
        if (place, row) in theirs:
            axes.plot(*zip(*theirs[place, row]), "x", color=drawn.get_color())
    if theirs:
        axes.plot([], [], "x", color="0.4", label="the paper's")
    axes.set(xlabel="sparsity (%)", ylabel="top-1 accuracy (%)", title=experiment.title)
    return finish(picture, folder / f"{experiment.name}.png")


def finish(picture: Picture, path: Path) -> Path:
    for axes in picture.axes:
        axes.grid(alpha=0.3)
        axes.legend(frameon=False)
        axes.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    picture.savefig(path, dpi=150)
    return path
