"""What each layer keeps, as data."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from optg.core.clock import Clock
from optg.core.layer_kinds import Axes
from optg.core.weights import SparseWeights

if TYPE_CHECKING:
    from optg.terminal import Table


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


def describe_progress(weights: SparseWeights, clock: Clock, has_target: bool) -> str:
    """Return sparsity and step in words."""
    return f"sparsity {weights.sparsity:.4f}{f' of {weights.target}' if has_target else ''}, {clock.position}"


def as_table(layers: list[LayerSummary], title: str) -> "Table":
    """Return the summaries as a table for rich."""
    try:
        from optg.terminal import layer_table
    except ImportError:
        raise ImportError("summary() needs rich: pip install 'optg[cli]'. layers() returns the same as data") from None
    return layer_table(layers, title)
