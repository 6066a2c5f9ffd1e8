"""Sums of floats that are the same in any order, on any device and over any number of ranks."""

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from optg.core.sharding import Shards


class FixedPoint:
    """Floats as integers, all scaled by one power of two, so that sums of them are exact.

    Infinite values become the largest integers.
    """

    def __init__(self, values: Sequence[Tensor], terms: int, shards: Shards | None, passes: Any) -> None:
        """Choose the scale for sums of up to `terms` values. `nan` tells which tensors hold NaN."""
        self.nan, largest = passes.scan(values)
        if shards:
            dist.all_reduce(largest, dist.ReduceOp.MAX, group=shards.group)
        bits = 61 - max(terms - 1, 1).bit_length()  # size of the integers
        types = {wide(dtype) for dtype in {value.dtype for value in values}}
        highest = min(int(math.log2(torch.finfo(dtype).max)) for dtype in types) - 1  # a finite factor
        self.factor = torch.ldexp(torch.ones_like(largest), (bits - torch.frexp(largest).exponent).clamp(max=highest))
        self.limit = 2.0 ** (bits + 1)

    def encode(self, values: Tensor) -> Tensor:
        """Return the values as int64; 0 for NaN."""
        scaled = values.to(wide(values.dtype)) * self.factor.to(values.device, wide(values.dtype))
        return scaled.nan_to_num_(nan=0.0, posinf=self.limit, neginf=-self.limit).round_().to(torch.int64)

    def means(self, sums: Tensor, sizes: Tensor | int, nan: Tensor) -> Tensor:
        """Return the means, in float64, of units with these sums and sizes; NaN if `nan` is set."""
        device = sums.device
        return sums.double().div_(sizes).div_(self.factor.to(device)).masked_fill_(nan.to(device), math.nan)


def wide(dtype: torch.dtype) -> torch.dtype:
    """Return a type that holds the scaled values. In float16, large ones would overflow and small ones vanish."""
    return torch.promote_types(dtype, torch.float32)
