"""What each layer keeps, as data and as a table to print."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from optg.core.prunable import Axes
from optg.core.weights import SparseWeights

if TYPE_CHECKING:
    from rich.table import Table


@dataclass(frozen=True)
class LayerSummary:
    """One prunable weight, and what the last change of its mask removed and revived."""

    name: str
    shape: tuple[int, ...]
    weights: int
    kept: int
    removed: int
    revived: int
    axes: Axes

    @property
    def density(self) -> float:
        return self.kept / self.weights


def summarize(weights: SparseWeights) -> list[LayerSummary]:
    """Return a summary of each layer. Waits for the device."""
    rows = weights.names, weights.shapes, weights.counts.tolist(), weights.axes
    return [
        LayerSummary(name, tuple(shape), shape.numel(), shape.numel() - zeros, removed, revived, axis)
        for name, shape, (zeros, removed, revived), axis in zip(*rows)
    ]


def render(layers: list[LayerSummary], title: str) -> "Table":
    """Return the summary as a table for rich."""
    try:
        from rich.table import Table
    except ImportError:
        raise ImportError("summary() needs rich: pip install 'optg[cli]'; layers() returns the same as data") from None
    table = Table(title=title, title_justify="left")
    table.add_column("layer", overflow="fold")
    for column in ("shape", "weights", "kept", "density", "removed", "revived"):
        table.add_column(column, justify="right")

    def add(name: str, shape: str, size: int, kept: int, removed: int, revived: int, **style: Any) -> None:
        table.add_row(name, shape, f"{size:,}", f"{kept:,}", f"{kept / size:.2%}", f"{removed:,}", f"{revived:,}", **style)

    for layer in layers:
        add(layer.name, "×".join(map(str, layer.shape)), layer.weights, layer.kept, layer.removed, layer.revived)
    table.add_section()
    totals = [sum(getattr(layer, key) for layer in layers) for key in ("weights", "kept", "removed", "revived")]
    add("all", "", *totals, style="bold")
    return table
