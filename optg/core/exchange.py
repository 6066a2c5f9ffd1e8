"""Exchange: drop some kept weights and grow as many others (SET, RigL, GraNet)."""

from collections.abc import Callable

import torch
from torch import Tensor

from optg.core.masks import Masks
from optg.core.pools import Pool


def exchange(
    masks: Masks, share: float, values: list[Tensor], grow_scores: dict[int, Tensor], on_growth: Callable[[int, Tensor], None]
) -> None:
    """In each layer with `grow_scores`, drop a share of the kept units and grow as many others.

    The kept units of least magnitude go; of the others, those with the largest `grow_scores` come. `on_growth` is
    called with each layer and its grown weights before the masks change.
    """
    new = dict[int, Tensor]()
    for whole in masks.pools:
        layers = [layer for layer in whole.layers if layer in grow_scores]
        if layers:
            new.update(exchange_in(masks, whole.narrow(layers), share, values, grow_scores))
    for layer, mask in new.items():
        on_growth(layer, mask & ~masks.tensors[layer])
    masks.replace(new.get(layer, mask) for layer, mask in enumerate(masks.tensors))


def exchange_in(
    masks: Masks, pool: Pool, share: float, values: list[Tensor], grow_scores: dict[int, Tensor]
) -> dict[int, Tensor]:
    """Return the masks of a pool's layers after an exchange."""
    own = masks.of(pool, masks.tensors)
    before = pool.sample(own)
    sizes = [shape.numel() for shape in pool.unit_shapes]
    known = torch.tensor([pool.layers, sizes, pool.most])
    index, sizes, most = known.to(masks.counts.device, non_blocking=True)
    zeros = masks.counts[index, 0] if pool.structure.units_are_weights else masks.count_zeros(pool, before)
    moved = (share * (sizes - zeros).double()).long()
    if pool.floor:
        moved = moved.minimum(most - zeros).clamp(min=0)
    magnitudes = pool.unit_scores([value.abs() for value in masks.of(pool, values)])
    magnitudes = [magnitude.where(unit, -1.0) for magnitude, unit in zip(magnitudes, before)]
    if pool.floor:
        magnitudes = [pool.floor.raise_scores(*unit) for unit in zip(magnitudes, pool.unit_axes)]
    stay = masks.keep_units(pool, magnitudes, zeros + moved)
    growth = [s.masked_fill(kept, -1.0) for s, kept in zip(pool.unit_scores(masks.of(pool, grow_scores)), stay)]
    grown = grow(masks, pool, growth, stay, before, sizes - moved)
    return dict(zip(pool.layers, pool.expand([kept | grows for kept, grows in zip(stay, grown)], own)))


def grow(
    masks: Masks, pool: Pool, growth: list[Tensor], stay: list[Tensor], before: list[Tensor], zeros: Tensor
) -> list[Tensor]:
    """Return which units grow in the layers of a pool: so many of each layer, or as the structure says."""
    grown = [pool.structure.grow(*unit) for unit in zip(growth, stay, before, pool.unit_axes)]
    found = [grows for grows in grown if grows is not None]
    if len(found) < len(grown):
        return masks.keep_units(pool, growth, zeros)
    masks.nan_watch.add(torch.stack([score.isnan().any().long() for score in growth]), pool.unit_names)
    return found
