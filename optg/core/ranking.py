"""Scores -> masks, exactly: the ⌈P·N⌉ smallest scores over all tensors go (Eq. 5), ties by index, lowest first.

A radix selection on the bits of the floats finds the largest score to remove: a histogram of the upper 16 bits, then of the
lower 16 among those that share the upper ones (on a GPU, 8 bits at a time). It is linear, sorts nothing, joins no copy of
the scores (it works through small chunks), and gives the same masks on any device, layout and number of ranks: where the
scores are shards, only histograms and counts are exchanged.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from optg.core.passes import find_kernels
from optg.core.sharding import Shards

CHUNK = 1 << 18  # scores looked at together: they stay in cache, and are 1 % of a ResNet-50


def zeros_at(sparsity: float, size: int) -> int:
    """How many of `size` weights a mask of this sparsity removes."""
    return math.ceil(sparsity * size)


class Threshold(NamedTuple):
    """Where a cut falls: all scores below `value` go, and the first `removed` of the `equal` ones that have it."""

    value: float
    removed: int
    equal: int


class Cuts(NamedTuple):
    """Thresholds of one cut of all tensors, or of one cut of each, and which tensors have NaN: on the scores' device."""

    values: Tensor
    removed: Tensor
    equal: Tensor
    nan: Tensor

    def on_host(self) -> list[Threshold]:
        columns = torch.stack([t.double() for t in self[:3]])
        return [Threshold(value, int(removed), int(equal)) for value, removed, equal in columns.T.tolist()]  # a sync


Zeros = int | Sequence[int] | Tensor  # how many scores a cut of all tensors removes, or how many the cut of each does


def keep_top(
    scores: Sequence[Tensor], zeros: Zeros, *, shards: Shards | None = None, names: Sequence[str] | None = None
) -> list[Tensor]:
    """Masks (True: kept) that remove exactly the `zeros` smallest scores of all tensors together, or of each.

    >>> keep_top([torch.tensor([3.0, 1.0]), torch.tensor([2.0, 2.0])], zeros=2)
    [tensor([ True, False]), tensor([False,  True])]
    """
    cuts = select(scores, zeros, shards)
    refuse_nan(cuts.nan, names)
    return masks_of(scores, cuts, shards)


def masks_of(scores: Sequence[Tensor], cuts: Cuts, shards: Shards | None = None) -> list[Tensor]:
    """New masks."""
    if not shards and (kernels := find_kernels(scores)):
        masks = [torch.empty_like(s, dtype=torch.bool) for s in scores]
        if recut(masks, scores, cuts, kernels.TABLES) is not None:
            return masks
    return list(each_mask(scores, cuts, shards))


def each_mask(scores: Sequence[Tensor], cuts: Cuts, shards: Shards | None = None) -> Iterator[Tensor]:
    """The masks of cuts, one at a time, so that no second set of masks need exist."""
    found = cuts.on_host()
    if len(found) == 1:
        yield from masks_at(found[0], scores, shards)
    else:
        for i, (score, cut) in enumerate(zip(scores, found)):
            yield from masks_at(cut, [score], shards and shards.of(i))


def masks_at(cut: Threshold, scores: Sequence[Tensor], shards: Shards | None) -> Iterator[Tensor]:
    scores = comparable(scores)
    if cut.removed == 0:
        yield from (torch.ones_like(s, dtype=torch.bool) for s in scores)
    elif cut.removed == cut.equal:
        yield from (torch.gt(s, cut.value) for s in scores)
    else:
        for score, (first, tied) in zip(scores, share_ties(scores, cut, shards)):
            mask = torch.ge(score, cut.value) if first == 0 else torch.gt(score, cut.value)
            if 0 < first < tied:
                keep_ties_after(first, score, cut.value, mask)
            yield mask


def comparable(scores: Sequence[Tensor]) -> list[Tensor]:
    """All of one type that has integers of its size: float64 where any is, else float32."""
    dtype = torch.float64 if any(s.dtype == torch.float64 for s in scores) else torch.float32
    return [s if s.dtype == dtype else s.to(dtype) for s in scores]


def select(scores: Sequence[Tensor], zeros: Zeros, shards: Shards | None = None) -> Cuts:
    """The threshold that removes the `zeros` smallest scores of all tensors together, or for each tensor that of its own."""
    if isinstance(zeros, int):
        return thresholds(scores, [zeros], shards)
    if find_kernels(scores):
        return thresholds(scores, zeros, shards, each=True)
    wanted = zeros.tolist() if isinstance(zeros, Tensor) else zeros
    cuts = [thresholds([s], [z], shards and shards.of(i)) for i, (s, z) in enumerate(zip(scores, wanted))]
    return Cuts(*(torch.cat([t.to(scores[0].device) for t in column]) for column in zip(*cuts)))


def thresholds(scores: Sequence[Tensor], zeros: Sequence[int] | Tensor, shards: Shards | None, each: bool = False) -> Cuts:
    """Of all tensors together, or (where there are kernels) of each. Kernels do not make the host wait."""
    scores = comparable(scores)
    dtype, device = scores[0].dtype, scores[0].device
    flat = [storage_order(s) for s in scores]
    if shards:
        flat = [f if counted else f[:0] for f, counted in zip(flat, shards.counted())]
    count, bits, narrow = counter(flat, each)
    nan = torch.zeros(len(flat), dtype=torch.int64, device=device)
    wanted = ranks = torch.as_tensor(zeros).to(device, torch.int64, non_blocking=True).contiguous()[:, None]
    prefixes = torch.zeros_like(ranks)  # the keys' upper bits, as far as they are known
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
    values = floats(prefixes, dtype).masked_fill(wanted <= 0, -math.inf)
    removed, equal = (t * (wanted > 0) for t in (ranks, equal))
    return Cuts(values[:, 0], removed[:, 0], equal[:, 0], nan)


def recut(masks: list[Tensor], scores: Sequence[Tensor], cuts: Cuts, tables: Callable[..., Any] | None) -> Tensor | None:
    """Set masks by a cut of all scores, or one of each tensor's, without a wait for the GPU; None where that cannot be.

    Returns for each tensor how many entries are removed now, were until now not, and come back.
    """
    kernels, scores, each = find_kernels(masks), comparable(scores), len(cuts.values) > 1
    if not kernels or not tables or (table := tables(masks, scores)) is None:
        return None
    if (places := kernels.places(masks, each)) is None:
        return None
    longest = max(s.numel() for s in scores) if each else sum(s.numel() for s in scores)
    split = cuts.removed < cuts.equal  # where some of the ties go: those of the lowest indices
    ranks, prefixes = cuts.removed[:, None], torch.zeros_like(cuts.removed)[:, None]
    bits = kernels.TIE_BITS
    for shift in range(((longest - 1).bit_length() - 1) // bits * bits, -1, -bits):
        counts = kernels.count_ties(table, scores[0].dtype, cuts.values, split, places, prefixes, shift)
        prefixes, ranks, _ = kernels.narrow(counts, prefixes, ranks)
    last = torch.where(split, prefixes[:, 0], torch.where(cuts.removed > 0, kernels.DROP, kernels.KEEP))
    values, last = (t.expand(len(masks)).contiguous() for t in (cuts.values, last))
    return kernels.recut(table, scores[0].dtype, values, last, places)


def floats(keys: Tensor, dtype: torch.dtype) -> Tensor:
    """What `keys` are the keys of."""
    integer = torch.int64 if dtype == torch.float64 else torch.int32
    return torch.where(keys < 0, keys ^ torch.iinfo(integer).max, keys).to(integer).view(dtype)


Counter = Callable[[Tensor, Tensor, bool, int], Tensor]
Narrower = Callable[[Tensor, Tensor, Tensor], Sequence[Tensor]]


def counter(scores: Sequence[Tensor], each: bool) -> tuple[Counter, int, Narrower]:
    """The way to count on the scores' device, how many bits of a key one round of it decides, and the way to decide them.

    counter(prefixes, nan, first, shift) says how often each value of the bits at `shift` occurs in the keys whose higher bits
    are the prefix, over all tensors or for each; in the first round there is no prefix, and `nan` is set where a tensor has it.
    """
    if kernels := find_kernels(scores):
        table = kernels.TABLES(scores)  # of one-dimensional views of whole memory
        return partial(kernels.count, table, each, bits=8, width=scores[0].itemsize * 8), 8, kernels.narrow
    return partial(count_in_chunks, scores, bits=16), 16, narrow


def narrow(counts: Tensor, prefixes: Tensor, ranks: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The next digit of the key at each rank, given how often each digit occurs after its prefix.

    Returns the longer prefix, the rank among the keys that share it, and how many they are.
    """
    sums = counts.cumsum(1)
    digits = torch.searchsorted(sums, ranks).clamp_(max=counts.shape[1] - 1)
    equal = counts.gather(1, digits)
    return prefixes * counts.shape[1] + digits, ranks - (sums.gather(1, digits) - equal), equal


def count_in_chunks(scores: Sequence[Tensor], prefixes: Tensor, nan: Tensor, first: bool, shift: int, *, bits: int) -> Tensor:
    """In numpy, on one thread: with torch's threads each of these short operations may wait for a busy core."""
    counts, prefix = np.zeros(1 << bits, dtype=np.int64), int(prefixes)
    for layer, score in enumerate(scores):
        for chunk in score.split(CHUNK) if len(score) else ():
            values = chunk.cpu().numpy()
            digits = keys(values)
            digits >>= shift
            if first:
                digits += 1 << bits - 1
                if np.isnan(values.max()):  # the maximum is NaN where any value is
                    nan[layer] = 1
            else:
                digits = digits[(digits >> bits) == prefix] & (1 << bits) - 1
            counts += np.bincount(digits, minlength=1 << bits)
    return torch.from_numpy(counts)[None].to(nan.device)


def refuse_nan(found: Tensor, names: Sequence[str] | None) -> None:
    if layers := found.nonzero().flatten().tolist():  # a sync
        where = ", ".join(names[i] if names else f"tensor {i}" for i in layers)
        raise FloatingPointError(f"NaN in the scores of {where}: training has diverged, no mask can be ranked from it")


def keys(scores: np.ndarray) -> np.ndarray:
    """Signed integers in the order of the scores. Adding 0.0 makes one zero of 0.0 and −0.0."""
    return flip((scores + np.zeros((), scores.dtype)).view(f"i{scores.itemsize}"))


def flip(bits: np.ndarray) -> np.ndarray:
    """Invert all but the sign of negative floats, whose bits grow with their magnitude. Its own inverse; in place."""
    lower = bits >> (bits.itemsize * 8 - 1)
    lower &= np.iinfo(bits.dtype).max
    bits ^= lower
    return bits


def storage_order(score: Tensor) -> Tensor:
    """All values in one dimension, with no copy where memory holds nothing else (channels_last, transposed)."""
    if score.is_contiguous():
        return score.view(-1)
    order = sorted(range(score.ndim), key=score.stride, reverse=True)
    return score.permute(order).reshape(-1).contiguous()


def share_ties(scores: Sequence[Tensor], cut: Threshold, shards: Shards | None) -> list[tuple[int, int]]:
    """For each tensor, how many of the scores at the threshold it loses, and how many it has."""
    equal = torch.stack([s.eq(cut.value).count_nonzero().to(scores[0].device) for s in scores])
    whole = shards.total(equal) if shards else equal
    earlier = whole.cumsum(0) - whole
    if shards:
        earlier = earlier + shards.on_lower_ranks(equal)
    first = torch.minimum((cut.removed - earlier).clamp(min=0), equal)
    return list(zip(first.tolist(), equal.tolist()))


def keep_ties_after(removed: int, score: Tensor, value: float, mask: Tensor) -> None:
    """Keep the scores equal to `value`, but for the first `removed` in logical (row-major) order."""
    rows = max(1, CHUNK // max(1, score[:1].numel()))
    for chunk, kept in zip(score.split(rows), mask.split(rows)):
        equal = chunk.eq(value).reshape(-1)
        places = equal.nonzero().flatten()
        equal[places[:removed]] = False
        kept |= equal.view(chunk.shape)
        removed = max(removed - len(places), 0)
