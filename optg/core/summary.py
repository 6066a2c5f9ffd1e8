"""What each layer keeps, as data."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import nn

from optg.core.accounting import count
from optg.core.channels import shrink
from optg.core.clock import Clock
from optg.core.layer_kinds import Axes
from optg.core.prunable import unwrap
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
    structure: str = "unstructured"

    @property
    def density(self) -> float:
        return self.kept / self.weights if self.weights else 1.0


def summarize(weights: SparseWeights) -> list[LayerSummary]:
    """Return a summary of each layer. Waits for the device."""
    structures = weights.assignment.structures
    rows = list(zip(weights.names, weights.shapes, weights.counts.tolist(), weights.axes, structures))
    return [
        LayerSummary(name, tuple(shape), shape.numel(), shape.numel() - zeros, removed, revived, axis, str(structure))
        for name, shape, (zeros, removed, revived), axis, structure in (rows[layer] for layer in weights.ranked)
    ]


def notes_on(weights: SparseWeights, model: nn.Module) -> list[str]:
    """Return what to say below the table: layers that stay dense, replaced budgets, and the size without removed channels."""
    notes, example = weights.assignment.notes, weights.assignment.example
    erk = [str(pool.structure) for pool in weights.mask_set.pools if pool.replaced_erk]
    notes += [f"uniform budget instead of erk, which {structure} does not support" for structure in erk]
    if weights.sparsity and example is not None and not isinstance(example, list):  # a list holds groups, not an input
        small = shrink(model, example)
        dense, shrunk = count(unwrap(model), example), count(small, example)
        notes.append(
            f"after optg.shrink: {shrunk.parameters:,} of {dense.parameters:,} parameters, "
            f"{shrunk.dense_flops / 1e6:,.4g} of {dense.dense_flops / 1e6:,.4g} MFLOPs"
        )
    return notes


def describe_progress(weights: SparseWeights, clock: Clock, has_target: bool) -> str:
    """Return sparsity and step in words."""
    return f"sparsity {weights.sparsity:.4f}{f' of {weights.target}' if has_target else ''}, {clock.position}"


def as_table(layers: list[LayerSummary], title: str, notes: Sequence[str] = ()) -> "Table":
    """Return the summaries as a table for rich."""
    try:
        from optg.terminal import layer_table
    except ImportError:
        raise ImportError("summary() needs rich: pip install 'optg[cli]'. layers() returns the same as data") from None
    return layer_table(layers, title, notes)
