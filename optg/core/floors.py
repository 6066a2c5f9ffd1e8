"""Floors: the share of its weights that every part of a layer, or every output neuron, keeps at least.

The largest scores of each group are protected: they rank above all others, so that no cut removes them. The number of zeros
in all layers together stays exact.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from optg.core.layer_kinds import Axes
from optg.core.ranking import zeros_at
from optg.core.sharding import Shards

GROUPS = ("part", "output")


@dataclass(frozen=True)
class Floor:
    """Keep at least ⌈share · n⌉ weights of each group of n: of each part of a layer, or of each output neuron."""

    share: float
    by: str = "part"

    def __post_init__(self) -> None:
        if not 0 < self.share < 1:
            raise ValueError(f"floor is {self.share!r}; expected a share of the weights, above 0 and below 1")
        if self.by not in GROUPS:
            raise ValueError(f"floor_by is {self.by!r}; expected 'part' or 'output'")

    def group_dims(self, axes: Axes) -> list[int]:
        """Return the dimensions that tell the groups of a weight apart."""
        return axes.neurons if self.by == "output" else [axes.stacked]

    def groups(self, shape: Sequence[int], axes: Axes) -> int:
        """Return the number of groups in a weight."""
        return math.prod(shape[dim] for dim in self.group_dims(axes)) if self.by == "output" else axes.parts

    def kept(self, shape: torch.Size, axes: Axes) -> int:
        """Return how many weights of a layer are protected."""
        groups = self.groups(shape, axes)
        return groups * math.ceil(self.share * (shape.numel() // groups))

    def raise_scores(self, score: Tensor, axes: Axes) -> Tensor:
        """Return a copy of a layer's scores with those of protected weights at infinity and all others below it.

        NaN stays NaN, so that ranking refuses it. Of equal scores, the last ones by index are protected, as in any cut.
        """
        raised = score.clamp(max=torch.finfo(score.dtype).max)
        if score.numel() == 0:
            return raised
        split = self.split(raised, axes)
        rows = split.reshape(self.groups(score.shape, axes), -1)
        count = math.ceil(self.share * rows.shape[1])
        least = rows.topk(count, dim=1).values[:, -1:]
        protected, ties = rows > least, rows == least
        missing = count - protected.sum(1, keepdim=True)
        if rows.is_cuda or bool((ties.sum(1, keepdim=True) > missing).any()):
            ties &= ties.flip(1).cumsum(1).flip(1) <= missing
        split.masked_fill_((protected | ties).view(split.shape), math.inf)
        return raised

    def split(self, score: Tensor, axes: Axes) -> Tensor:
        """Return a view of a weight whose first dimensions run over the groups, and the others over a group by index."""
        dims = self.group_dims(axes)
        if self.by == "part":
            score = score.unflatten(dims[0], (axes.parts, -1))
        return score.movedim(dims, list(range(len(dims))))

    def refuse(
        self, names: Sequence[str], shapes: Sequence[torch.Size], axes: Sequence[Axes], target: float, shards: Shards | None
    ) -> None:
        """Raise if the floor leaves no room for the sparsity, or if FSDP2 has split a group over processes."""
        size = sum(shape.numel() for shape in shapes)
        room, protected = size - zeros_at(target, size), sum(map(self.kept, shapes, axes))
        if protected > room:  # always so if the floor is above 1 − P
            raise ValueError(
                f"floor={self.share} protects {protected:,} of {size:,} weights (that share of each {self.by}, rounded up), "
                f"but sparsity {target} keeps only {room:,}; lower the floor or the sparsity"
            )
        for name, shape, axis, piece in zip(names, shapes, axes, shards.pieces if shards else [False] * len(names)):
            whole = 0 in self.group_dims(axis) and (self.by == "output" or axis.parts == shape[0])
            if piece and not whole:
                raise ValueError(
                    f"floor_by={self.by!r} needs the whole of {name}, which FSDP2 has split; expected floor_by='output' on "
                    "output-first weights, or DDP"
                )
