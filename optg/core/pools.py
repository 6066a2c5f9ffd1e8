"""Pools: the layers that share a structure, and are ranked together."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from optg.core.fixed_point import FixedPoint
from optg.core.floors import Floor
from optg.core.layer_kinds import Axes
from optg.core.passes import of_units
from optg.core.ranking import Zeros
from optg.core.sharding import Shards
from optg.core.structures import Unstructured


class Pool:
    """Some layers of a model with their structure: scores of their units, and masks made from these.

    Lists that start with `unit_` have one entry per tensor of units, all others one per layer of the pool. If FSDP2 has split
    a layer across its units, every rank joins the pieces and computes the units of the whole layer.
    """

    def __init__(
        self,
        structure: Unstructured,
        layers: Sequence[int],
        names: Sequence[str],
        shapes: Sequence[torch.Size],
        axes: Sequence[Axes],
        shards: Shards | None,
        passes: Any,
    ) -> None:
        self.structure, self.layers = structure, list(layers)
        self.names, self.shapes, self.axes = [names[i] for i in layers], [shapes[i] for i in layers], [axes[i] for i in layers]
        self.pieces = shards.of(self.layers) if shards else None
        split = self.pieces.pieces if self.pieces else [False] * len(self.layers)
        self.joined = [piece and structure.crosses_rows(axis) for piece, axis in zip(split, self.axes)]
        self.passes = of_units(None if self.pieces else passes)
        self.floor: Floor | None = None
        self.replaced_erk = False  # a cut asked for an `erk` budget and got a uniform one
        self.sizes: list[Tensor] = []  # weights in each unit; made when first needed
        self.largest = 1  # weights in the largest unit
        self.describe_units()

    def describe_units(self) -> None:
        """Set names, axes, shapes and shards of the tensors of units, and how many units each tensor may lose."""
        self.unit_names, self.unit_axes = self.names, self.axes
        self.unit_shapes = [torch.Size(self.structure.unit_shape(*layer)) for layer in zip(self.shapes, self.axes)]
        self.most = list(map(self.structure.most_zeros, self.shapes, self.axes))
        self.shards = self.pieces
        if self.pieces and any(self.joined):
            whole = (piece and not joined for piece, joined in zip(self.pieces.pieces, self.joined))
            self.shards = Shards(self.pieces.group, tuple(whole))

    def set_floor(self, floor: Floor | None, target: float) -> None:
        """Protect the largest scores of every group of units from now on. Raise if that is impossible.

        N:M needs no floor: if the floor leaves room for the target, every group keeps more than that anyway.
        """
        if not floor or self.most != [shape.numel() for shape in self.unit_shapes]:
            return
        floor.refuse(self.unit_names, self.unit_shapes, self.unit_axes, target, self.shards)
        self.floor = floor
        kept = map(floor.kept, self.unit_shapes, self.unit_axes)
        self.most = [min(most, shape.numel() - least) for most, shape, least in zip(self.most, self.unit_shapes, kept)]

    def narrow(self, layers: Sequence[int]) -> "Pool":
        """Return a pool of some of the layers."""
        at = [self.layers.index(layer) for layer in layers]
        pool = Pool(self.structure, at, self.names, self.shapes, self.axes, self.pieces, self.passes)
        pool.layers, pool.floor, pool.most = list(layers), self.floor, [self.most[i] for i in at]
        return pool

    def zeros(self, sparsity: float, target: float, budget: str) -> Zeros:
        """Return how many units a cut removes in all, or in each tensor of units under a budget."""
        if budget == "erk" and not self.structure.allows_erk:
            budget, self.replaced_erk = "uniform", True
        progress = sparsity / target if target else 0.0
        return self.structure.zeros(sparsity, progress, budget, self.unit_shapes, self.most)

    # ---- units of weights

    def unit_scores(self, scores: Sequence[Tensor]) -> list[Tensor]:
        """Return the mean score of each unit, the same on any device and however FSDP2 has split the layers."""
        whole = self.join(scores)
        if self.structure.units_are_weights:
            return whole
        if not self.sizes:
            self.sizes = [self.structure.sizes(s.shape, axes, s.device) for s, axes in zip(whole, self.axes)]
            self.largest = max((int(size.max()) for size in self.sizes if size.numel()), default=1)
        fixed = FixedPoint(whole, self.largest, self.pieces, self.passes)
        return self.passes.unit_means(self.structure, whole, self.axes, self.sizes, fixed)

    def protect(self, units: Sequence[Tensor]) -> list[Tensor]:
        """Return the scores of units, raised to infinity for units that must stay."""
        units = list(self.passes.protect(self.structure, units, self.unit_axes))
        return [self.floor.raise_scores(unit, axes) for unit, axes in zip(units, self.unit_axes)] if self.floor else units

    def sample(self, masks: Sequence[Tensor]) -> list[Tensor]:
        """Return the masks of units, given the masks of weights."""
        return [self.structure.sample(mask, axes) for mask, axes in zip(self.join(masks), self.axes)]

    def expand(self, units: Sequence[Tensor], like: Sequence[Tensor]) -> list[Tensor]:
        """Return one value per weight, given one per unit. `like` are tensors of the weights' local shapes."""
        shapes = [shape if joined else mask.shape for shape, mask, joined in zip(self.shapes, like, self.joined)]
        return self.split([self.structure.expand(*layer) for layer in zip(units, shapes, self.axes)])

    def write(self, masks: Sequence[Tensor], units: Sequence[Tensor]) -> Tensor:
        """Overwrite the masks of weights by masks of units. Return how many weights are zero, newly removed and revived."""
        return self.passes.write_units(self.structure, masks, units, self.axes, self.expand)

    def ratios(self, latent: Sequence[Tensor], masks: Sequence[Tensor], thresholds: Sequence[Tensor]) -> list[Tensor]:
        """Return threshold / magnitude for each weight: 1 or more where a soft threshold leaves nothing."""
        found = self.passes.ratios(self.structure, self.join(latent), self.join(masks), thresholds, self.axes)
        return self.split(found)

    def layer_values(self, values: Tensor) -> Tensor:
        """Return one value per layer, given one per tensor of units, or a single one."""
        return values.expand(len(self.layers))

    # ---- FSDP2

    def join(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return the tensors; whole where FSDP2 has split a layer across its units."""
        parts = zip(tensors, self.shapes, self.joined)
        return [self.pieces.join(t, shape[0]) if self.pieces and joined else t for t, shape, joined in parts]

    def split(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Invert `join`: return this rank's pieces."""
        return [self.pieces.split(t) if self.pieces and joined else t for t, joined in zip(tensors, self.joined)]


def make_pools(
    structures: Sequence[Unstructured],
    names: Sequence[str],
    shapes: Sequence[torch.Size],
    axes: Sequence[Axes],
    shards: Shards | None,
    passes: Any,
) -> list[Pool]:
    """Return the pools of layers that share a structure, in the order of their first layers."""
    layers: dict[Unstructured, list[int]] = {}
    for layer, structure in enumerate(structures):
        layers.setdefault(structure, []).append(layer)
    return [structure.pool_type(structure, mine, names, shapes, axes, shards, passes) for structure, mine in layers.items()]


Unstructured.pool_type = Pool
