"""The passes of structures in torch operations, for any device. Units are what a structure removes together.

`protect`, `scan`, `unit_means`, `write_units` and `ratios` are optional in a backend: one without them uses these.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from optg.core.fixed_point import FixedPoint
from optg.core.layer_kinds import Axes
from optg.core.passes import reference

CHUNK = 1 << 17  # weights whose units' sums are taken at once: their integers fit in cache


def protect(structure: Any, units: Sequence[Tensor], axes: Sequence[Axes]) -> list[Tensor]:
    """Return the scores of units, with those that no cut may remove at infinity."""
    return [structure.protect(*unit) for unit in zip(units, axes)]


def scan(values: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Return which tensors hold NaN, and the largest finite magnitude of all, in float64."""
    device, found = values[0].device, [torch.zeros((), dtype=torch.float64, device=values[0].device)]
    nan = []
    for value in values:
        magnitude = torch.stack(value.aminmax()).abs().amax() if value.numel() else found[0]
        nan.append(magnitude.isnan().to(device))
        if value.numel() and (value.device.type != "cpu" or not magnitude.isfinite()):
            magnitude = value.abs().nan_to_num_(nan=0.0, posinf=0.0).amax()
        found.append(magnitude.double().to(device))
    return torch.stack(nan), torch.stack(found).amax()


def unit_means(
    structure: Any, values: Sequence[Tensor], axes: Sequence[Axes], sizes: Sequence[Tensor], fixed: FixedPoint
) -> list[Tensor]:
    """Return the mean of the values in each unit, in float64. `sizes` are the numbers of weights in them."""
    layers = zip(values, axes, sizes, fixed.nan)
    return [fixed.means(unit_sums(structure, value, axis, fixed), size, nan) for value, axis, size, nan in layers]


def unit_sums(structure: Any, value: Tensor, axes: Axes, fixed: FixedPoint) -> Tensor:
    """Return the sums of a layer's units as integers. On a CPU a few rows are taken at a time, if no unit spans several."""
    if value.device.type != "cpu" or value.numel() <= CHUNK or structure.crosses_rows(axes):
        return structure.sums(fixed.encode(value), axes)
    rows = value.split(max(1, CHUNK * len(value) // value.numel()))
    return torch.cat([structure.sums(fixed.encode(row), axes) for row in rows])


def write_units(
    structure: Any,
    masks: Sequence[Tensor],
    units: Sequence[Tensor],
    axes: Sequence[Axes],
    expand: Callable[[Sequence[Tensor], Sequence[Tensor]], list[Tensor]],
) -> Tensor:
    """Overwrite the masks of weights by masks of units. Return counts as `write_masks` does. `expand` is the pool's."""
    new = expand(units, masks)
    return torch.stack([reference.overwrite(mask, n).to(masks[0].device) for mask, n in zip(masks, new)])


def ratios(
    structure: Any, latent: Sequence[Tensor], masks: Sequence[Tensor], thresholds: Sequence[Tensor], axes: Sequence[Axes]
) -> list[Tensor]:
    """Return threshold / magnitude for each weight: 1 or more where a soft threshold leaves nothing."""
    return [structure.ratio(*layer) for layer in zip(latent, masks, thresholds, axes)]


def repeat(values: Tensor, times: int, dim: int) -> Tensor:
    """Repeat each entry along a dimension. On a CPU, numpy takes a third of the time."""
    if times == 1 or values.device.type != "cpu":
        return values.repeat_interleave(times, dim) if times > 1 else values
    return torch.from_numpy(np.repeat(reference.bits(values.detach()).numpy(), times, dim)).view(values.dtype)
