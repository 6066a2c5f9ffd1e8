"""Exact selection: the score below which ⌈P·N⌉ of N scores fall (Eq. 5), found without sorting.

A radix selection reads the bits of the floats from the top: it counts how often each value of the upper bits occurs, picks
the value in which the wanted rank falls, and goes on with the bits below it. It is linear in the number of scores, copies
none of them, and returns the same threshold on any device, in any memory layout and on any number of ranks: where layers
are sharded, only histograms cross ranks.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from optg.core.sharding import Shards

CHUNK = 1 << 17  # scores that all steps of `raise_top` visit together: they fit in cache
Zeros = int | Sequence[int] | Tensor  # how many scores one cut over all tensors removes, or how many each tensor loses
Count = Callable[[Tensor, Tensor, bool, int], Tensor]
Narrow = Callable[[Tensor, Tensor, Tensor], Sequence[Tensor]]


def zeros_at(sparsity: float, size: int) -> int:
    """Return how many of `size` weights a mask of this sparsity removes."""
    return math.ceil(sparsity * size)


class Threshold(NamedTuple):
    """Where a cut falls: it removes all scores below `value`, and the first `removed` of the `equal` scores that equal it."""

    value: float
    removed: int
    equal: int


class Cuts(NamedTuple):
    """The threshold of one cut over all tensors, or one per tensor; and which tensors hold NaN. On the scores' device."""

    values: Tensor
    removed: Tensor
    equal: Tensor
    nan: Tensor

    def on_host(self) -> list[Threshold]:
        """Return the thresholds as Python numbers. Waits for the device."""
        columns = torch.stack([t.double() for t in self[:3]])
        return [Threshold(value, int(removed), int(equal)) for value, removed, equal in columns.T.tolist()]


def comparable(scores: Sequence[Tensor]) -> list[Tensor]:
    """Convert all scores to one type with integers of its size: float64 if any score has it, else float32."""
    dtype = torch.float64 if any(s.dtype == torch.float64 for s in scores) else torch.float32
    return [s if s.dtype == dtype else s.to(dtype) for s in scores]


def storage_order(score: Tensor) -> Tensor:
    """Flatten in memory order, without a copy if the tensor is dense in memory (channels_last, transposed)."""
    if score.is_contiguous():
        return score.view(-1)
    order = sorted(range(score.ndim), key=score.stride, reverse=True)
    return score.permute(order).reshape(-1).contiguous()


def flat_scores(scores: Sequence[Tensor], shards: Shards | None) -> list[Tensor]:
    """Return the scores of each tensor in one dimension; empty where another rank counts them."""
    flat = [storage_order(s) for s in scores]
    return [f if counted else f[:0] for f, counted in zip(flat, shards.counted())] if shards else flat


def radix_select(
    flat: Sequence[Tensor], zeros: Sequence[int] | Tensor, shards: Shards | None, count: Count, narrow: Narrow, bits: int
) -> Cuts:
    """Find the thresholds, `bits` of the key per round. `flat` comes from `flat_scores`.

    `count(prefixes, nan, first, shift)` returns how often each value of the bits at `shift` occurs among the keys whose higher
    bits are the prefix. In the first round there is no prefix, and the entry of `nan` is set for each tensor that holds NaN.
    `narrow(counts, prefixes, ranks)` picks the next digit; see `passes.reference.narrow`.
    """
    dtype, device = flat[0].dtype, flat[0].device
    nan = torch.zeros(len(flat), dtype=torch.int64, device=device)
    wanted = ranks = torch.as_tensor(zeros).to(device, torch.int64, non_blocking=True).contiguous()[:, None]
    prefixes = torch.zeros_like(ranks)  # the upper bits of the keys, as far as they are known
    first = dtype.itemsize * 8 - bits
    for shift in range(first, -1, -bits):
        counts = count(prefixes, nan, shift == first, shift)
        if shards:
            dist.all_reduce(counts, group=shards.group)
        prefixes, ranks, equal = narrow(counts, prefixes, ranks)
        if shift == first:
            prefixes -= 1 << bits - 1  # keys are signed
    if shards:
        dist.all_reduce(nan, group=shards.group)
    values = floats_from_keys(prefixes, dtype).masked_fill(wanted <= 0, -math.inf)
    removed, equal = (t * (wanted > 0) for t in (ranks, equal))
    return Cuts(values[:, 0], removed[:, 0], equal[:, 0], nan)


def floats_from_keys(keys: Tensor, dtype: torch.dtype) -> Tensor:
    """Invert `passes.reference.keys`: return the floats whose keys these are."""
    integer = torch.int64 if dtype == torch.float64 else torch.int32
    return torch.where(keys < 0, keys ^ torch.iinfo(integer).max, keys).to(integer).view(dtype)


def refuse_nan(found: Tensor, names: Sequence[str] | None) -> None:
    """Raise if any tensor's entry in `found` is set. Waits for the device."""
    if layers := found.nonzero().flatten().tolist():
        where = ", ".join(names[i] if names else f"tensor {i}" for i in layers[:3]) + (" …" if len(layers) > 3 else "")
        raise FloatingPointError(
            f"NaN in the scores of {where}: training has diverged, so no mask can be ranked from them. Go back to an earlier "
            "checkpoint, and lower the learning rate or clip gradients"
        )


def top_of(groups: Tensor, dim: int, n: int) -> Tensor:
    """Return a mask of the n largest along a dimension. Of equal values, the last ones are kept."""
    values, best = [value.contiguous() for value in groups.unbind(dim)], list[Tensor]()
    for value in values:
        for k, other in enumerate(best):
            best[k], value = torch.maximum(other, value), torch.minimum(other, value)
        if len(best) < n:
            best.append(value)
    kept = groups >= best[-1].unsqueeze(dim)
    if groups.is_cuda or kept.count_nonzero() != min(n, len(values)) * best[-1].numel():
        extra = kept.sum(dim) - n  # equal values, of which the first ones go
        for value, keep in zip(values, kept.unbind(dim)):
            drop = (value == best[-1]) & (extra > 0)
            keep &= ~drop
            extra -= drop.long()
    return kept


def raise_top(scores: Tensor, dim: int, n: int, m: int) -> Tensor:
    """Return scores with the n largest of every m neighbours along a dimension at infinity, and all others below it.

    It finds what `top_of` does, on a CPU and for small m: it sweeps over memory, and compares each score with those that are
    1, 2, ... places further.
    """
    order = sorted(range(scores.ndim), key=scores.stride, reverse=True)
    stored = scores.detach().permute(order)
    flat, length, stride = stored.reshape(-1).numpy(), scores.shape[dim], stored.shape[order.index(dim) + 1 :].numel()
    raised, line = np.empty_like(flat), length * stride
    lines = max(1, min(CHUNK, flat.size) // max(1, line))
    place = np.repeat(np.arange(length), stride)
    within = [np.tile((place % m + k < m) & (place + k < length), lines) for k in range(1, min(m, length))]
    later = sum((here.astype(np.int8) for here in within), np.zeros(lines * line, np.int8))  # members of the group
    for start in range(0, flat.size, lines * line):
        values, out = flat[start : start + lines * line], raised[start : start + lines * line]
        above = later[: values.size].copy()  # how many members rank above: of equal ones, the later
        for k, here in enumerate(within, 1):
            wins = ((values[: -k * stride] > values[k * stride :]) & here[: values.size - k * stride]).view(np.int8)
            above[k * stride :] += wins
            above[: -k * stride] -= wins
        np.multiply(above - np.float32(n - 0.5), -math.inf, out=out)
        np.maximum(out, np.minimum(values, np.finfo(values.dtype).max), out=out)
    return torch.from_numpy(raised).view(stored.shape).permute([order.index(d) for d in range(scores.ndim)])


def ranks_of(groups: Tensor, dim: int) -> Tensor:
    """Return each value's rank along a dimension, 0 for the largest. Of equal values, the last ranks first."""
    return groups.flip(dim).argsort(dim=dim, descending=True, stable=True).argsort(dim=dim).flip(dim)
