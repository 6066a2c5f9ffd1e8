"""Structures: which weights are removed together.

A *unit* is removed or kept as a whole: a single weight or a block of weights. A structure turns scores of weights into scores
of units, and masks of units into masks of weights. Every mask of every method is made through one of these classes, by
`optg.core.pools`. To add a structure, write a class and list it in STRUCTURES. `channel` is in `optg.core.channel_pool`.
"""

import math
import re
from collections.abc import Callable, Sequence
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from optg.core.budgets import layer_zeros
from optg.core.layer_kinds import Axes
from optg.core.passes.units import repeat
from optg.core.ranking import Zeros, raise_top, ranks_of, top_of, zeros_at

Shape = Sequence[int]


class Unstructured:
    """Single weights. The base class of all structures."""

    units_are_weights = True  # otherwise `expand` turns masks of units into masks of weights
    allows_erk = True  # otherwise an `erk` budget becomes uniform, with a note in the summary
    pattern = "unstructured"
    example = "unstructured"
    protects: tuple[int, int] | None = None  # N and M, if cuts protect the N largest of M neighbours
    pool_type: Any  # the class of its pools; `optg.core.pools` sets it

    def __init__(self, *numbers: str) -> None:
        self.numbers = [int(n) for n in numbers]

    @classmethod
    def parse(cls, text: str) -> Self | None:
        """Return the structure that a text names; None if it names another one."""
        found = re.fullmatch(cls.pattern, text)
        return cls(*found.groups()) if found else None

    def __str__(self) -> str:
        return re.sub(r"\(.*?\)", "{}", self.pattern).format(*self.numbers)

    def reason_to_skip(self, shape: Shape, axes: Axes) -> str:
        """Return why a layer of this shape stays dense; empty if it can be pruned."""
        return ""

    def crosses_rows(self, axes: Axes) -> bool:
        """Return whether units, or groups of them, extend along the weight's first dimension, which FSDP2 splits."""
        return False

    def unit_shape(self, shape: Shape, axes: Axes) -> Shape:
        """Return the shape of a layer's units: as many dimensions as the weight has, so that `axes` hold for it too."""
        return shape

    def grid(self, shape: Shape, axes: Axes) -> tuple[list[int], list[int], list[int]] | None:
        """Return the blocks that are units, or groups of them, see `Blocks.grid`; None if no kernel may handle them."""
        return None

    def most_zeros(self, shape: Shape, axes: Axes) -> int:
        """Return how many units of a layer may be removed at most."""
        return math.prod(self.unit_shape(shape, axes))

    def zeros(self, sparsity: float, progress: float, budget: str, shapes: list[torch.Size], most: list[int]) -> Zeros:
        """Return how many units a cut removes in all, or in each layer under a budget.

        `progress` is the share of the target that `sparsity` has reached; `shapes` are those of the units, and `most` is how
        many of them a layer may lose.
        """
        if budget == "global":
            return zeros_at(sparsity, sum(shape.numel() for shape in shapes))
        return layer_zeros(budget, shapes, sparsity, [shape.numel() - zeros for shape, zeros in zip(shapes, most)])

    def sums(self, values: Tensor, axes: Axes) -> Tensor:
        """Return the sum of the values in each unit."""
        return values

    def sizes(self, shape: Shape, axes: Axes, device: torch.device) -> Tensor:
        """Return the number of weights in each unit, or a single number if all are equal."""
        return torch.ones((), dtype=torch.int64, device=device)

    def protect(self, units: Tensor, axes: Axes) -> Tensor:
        """Return the scores with those of units that no cut may remove at infinity."""
        return units

    def sample(self, mask: Tensor, axes: Axes) -> Tensor:
        """Return the mask of a layer's units, given the mask of its weights."""
        return mask

    def expand(self, units: Tensor, shape: Shape, axes: Axes) -> Tensor:
        """Return one value per weight, given one per unit."""
        return units

    def grow(self, growth: Tensor, stays: Tensor, before: Tensor, axes: Axes) -> Tensor | None:
        """Return which units grow in a layer that has dropped some; None if those with the largest scores grow."""
        return None

    def ratio(self, latent: Tensor, mask: Tensor, threshold: Tensor, axes: Axes) -> Tensor:
        """Return threshold / magnitude for each weight: 1 or more where a soft threshold leaves nothing."""
        return threshold / latent.abs()


class NM(Unstructured):
    """N of every M neighbours along the input dimension are kept. A last group of r < M keeps min(N, r).

    While the sparsity rises, the N largest scores of every group are protected, and the others are ranked as usual.
    """

    allows_erk = False
    pattern = r"(\d+):(\d+)"
    example = "2:4"

    def __init__(self, *numbers: str) -> None:
        super().__init__(*numbers)
        self.n, self.m = self.protects = self.numbers[0], self.numbers[1]
        if not 0 < self.n < self.m <= 64:
            raise ValueError(f"structure is '{self.n}:{self.m}'; expected N:M with 0 < N < M ≤ 64, such as '2:4'")

    def reason_to_skip(self, shape: Shape, axes: Axes) -> str:
        return f"fewer than {self.m} inputs" if shape[axes.input] < self.m else ""

    def crosses_rows(self, axes: Axes) -> bool:
        return axes.input == 0

    def grid(self, shape: Shape, axes: Axes) -> tuple[list[int], list[int], list[int]]:
        return Blocks("1", str(self.m)).grid(shape, axes)

    def most_zeros(self, shape: Shape, axes: Axes) -> int:
        inputs = shape[axes.input]
        zeros = inputs // self.m * (self.m - self.n) + max(inputs % self.m - self.n, 0)
        return math.prod(shape) // inputs * zeros

    def zeros(self, sparsity: float, progress: float, budget: str, shapes: list[torch.Size], most: list[int]) -> Zeros:
        """Ignore `sparsity`: the target is what the groups allow, and `progress` says how much of it is reached."""
        total = math.ceil(min(progress, 1.0) * sum(most))
        if budget == "global":
            return total
        return most if progress >= 1 else super().zeros(total / sum(map(math.prod, shapes)), progress, budget, shapes, most)

    def protect(self, units: Tensor, axes: Axes) -> Tensor:
        if units.device.type == "cpu" and units.dtype in (torch.float32, torch.float64) and self.m <= 16:  # it takes M steps
            return raise_top(units, axes.input, self.n, self.m)
        top = self.by_group(lambda groups, dim: top_of(groups, dim, self.n), units, axes)
        boost = top.to(units.dtype).sub_(0.5).mul_(math.inf)  # ±∞; on a CPU this is twice as fast as masked_fill
        return torch.maximum(boost, units.clamp(max=torch.finfo(units.dtype).max), out=boost)

    def grow(self, growth: Tensor, stays: Tensor, before: Tensor, axes: Axes) -> Tensor | None:
        """Let each group grow as many weights as it has lost."""
        lost = self.by_group(lambda groups, dim: groups.sum(dim, keepdim=True).expand_as(groups), (before & ~stays).int(), axes)
        return self.by_group(ranks_of, growth, axes) < lost

    def ratio(self, latent: Tensor, mask: Tensor, threshold: Tensor, axes: Axes) -> Tensor:
        """The threshold of a group is its largest removed magnitude."""
        removed = latent.abs().masked_fill_(mask, 0.0)
        largest = self.by_group(lambda groups, dim: groups.amax(dim, keepdim=True).expand_as(groups), removed, axes)
        return (largest / latent.abs()).nan_to_num_(nan=0.0)

    def by_group(self, function: Callable[[Tensor, int], Tensor], values: Tensor, axes: Axes) -> Tensor:
        """Apply a function to all whole groups, then to shorter ones. It is given the dimension of their members."""
        dim, length = axes.input, values.shape[axes.input]
        whole, found = length // self.m * self.m, []
        for part, size in (values.narrow(dim, 0, whole), self.m), (values.narrow(dim, whole, length - whole), length - whole):
            if part.shape[dim]:
                found.append(function(part.unflatten(dim, (-1, size)), dim + 1).flatten(dim, dim + 1))
        return torch.cat(found, dim) if len(found) > 1 else found[0]


class Blocks(Unstructured):
    """Blocks of R filters × C input channels, at one position of the kernel; shorter where R or C does not divide.

    A unit's score is the mean of its weights' scores.
    """

    units_are_weights = False
    pattern = r"(\d+)x(\d+)"
    example = "1x4"

    def __init__(self, *numbers: str) -> None:
        super().__init__(*numbers)
        if self.numbers and not 1 < math.prod(self.numbers) <= 4096:
            raise ValueError(
                f"structure is '{'x'.join(numbers)}'; expected RxC with 2 to 4096 weights in a block, such as '1x4'"
            )

    def tile(self, shape: Shape, axes: Axes) -> list[int]:
        """Return the length of a unit along each dimension."""
        lengths = {axes.output: self.numbers[0], axes.input: self.numbers[1]}
        return [lengths.get(dim, 1) for dim in range(len(shape))]

    def reason_to_skip(self, shape: Shape, axes: Axes) -> str:
        fewest = max(2, self.tile(shape, axes)[axes.input])
        return f"fewer than {fewest} inputs" if shape[axes.input] < fewest else ""

    def crosses_rows(self, axes: Axes) -> bool:
        return self.tile([2] * (1 + max(axes.output, axes.input)), axes)[0] > 1

    def grid(self, shape: Shape, axes: Axes) -> tuple[list[int], list[int], list[int]]:
        """Return the shape of a layer, of its units and of one unit. No unit spans two parts that are stacked in the layer."""
        full, tile, dim = list(shape), self.tile(shape, axes), axes.stacked
        if axes.parts > 1 and tile[dim] > 1:
            full[dim : dim + 1], tile[dim : dim + 1] = [axes.parts, shape[dim] // axes.parts], [1, tile[dim]]
        return full, [-(-n // t) for n, t in zip(full, tile)], tile

    def unit_shape(self, shape: Shape, axes: Axes) -> Shape:
        _, grid, _ = self.grid(shape, axes)
        if len(grid) > len(shape):
            grid[axes.stacked : axes.stacked + 2] = [math.prod(grid[axes.stacked : axes.stacked + 2])]
        return grid

    def sums(self, values: Tensor, axes: Axes) -> Tensor:
        full, grid, tile = self.grid(values.shape, axes)
        padding = [side for n, g, t in zip(full, grid, tile) for side in (g * t - n, 0)]
        padded = F.pad(values.reshape(full), padding[::-1]) if any(padding) else values.reshape(full)
        split = padded.reshape([side for g, t in zip(grid, tile) for side in (g, t)])
        return split.sum([2 * dim + 1 for dim, t in enumerate(tile) if t > 1]).reshape(self.unit_shape(values.shape, axes))

    def sizes(self, shape: Shape, axes: Axes, device: torch.device) -> Tensor:
        full, grid, tile = self.grid(shape, axes)
        if all(n == g * t for n, g, t in zip(full, grid, tile)):
            return torch.full((), math.prod(tile), device=device)  # made on the device: a CUDA graph may capture it
        return self.sums(torch.ones(list(shape), dtype=torch.int64, device=device), axes)

    def sample(self, mask: Tensor, axes: Axes) -> Tensor:
        full, _, tile = self.grid(mask.shape, axes)
        first = mask.reshape(full)[tuple(slice(None, None, t) for t in tile)]
        return first.reshape(self.unit_shape(mask.shape, axes))

    def expand(self, units: Tensor, shape: Shape, axes: Axes) -> Tensor:
        full, grid, tile = self.grid(shape, axes)
        units = units.reshape(grid)
        for dim, length in enumerate(tile):
            units = repeat(units, length, dim)
        return units[tuple(map(slice, full))].reshape(list(shape))

    def ratio(self, latent: Tensor, mask: Tensor, threshold: Tensor, axes: Axes) -> Tensor:
        """The magnitude of a unit is the mean of its weights' magnitudes."""
        means = self.sums(latent.abs(), axes) / self.sizes(latent.shape, axes, latent.device)
        return self.expand((threshold / means).nan_to_num_(nan=0.0).to(latent.dtype), latent.shape, axes)


STRUCTURES: list[type[Unstructured]] = [Unstructured, NM, Blocks]
