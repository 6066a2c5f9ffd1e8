"""Scores -> masks, exactly: the ⌈P·N⌉ smallest scores over all tensors go (Eq. 5), ties by index, lowest first.

A radix selection on the bits of the floats finds the largest score to remove: a histogram of the upper 16 bits, then of the
lower 16 among those that share the upper ones (on a GPU, 8 bits at a time). It is linear, sorts nothing, joins no copy of
the scores (it works through small chunks), and gives the same masks on any device, layout and number of ranks: where the
scores are shards, only histograms and counts are exchanged.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

CHUNK = 1 << 18  # scores looked at together: they stay in cache, and are 1 % of a ResNet-50


@dataclass(frozen=True)
class Shards:
    """How the tensors of this process fit into the whole: `pieces[i]` says whether tensor i is a piece of a layer that is
    split along its first dimension over `group`; the others are held whole by every rank of it."""

    group: dist.ProcessGroup
    pieces: tuple[bool, ...]

    def counted(self) -> Tensor:
        """Which tensors this rank counts, so that each is counted once over all ranks."""
        return torch.tensor(self.pieces) | (dist.get_rank(self.group) == 0)

    def total(self, counts: Tensor) -> Tensor:
        """The sum over all ranks, entry i of `counts` being about tensor i."""
        counts = counts * self.counted().to(counts.device).view(-1, *[1] * (counts.ndim - 1))
        dist.all_reduce(counts, group=self.group)
        return counts

    def on_lower_ranks(self, counts: Tensor) -> Tensor:
        """For each tensor, the sum of `counts` over the pieces of its layer that lower ranks hold."""
        everyone = [torch.empty_like(counts) for _ in range(dist.get_world_size(self.group))]
        dist.all_gather(everyone, counts, group=self.group)
        lower = torch.stack(everyone)[: dist.get_rank(self.group)].sum(0)
        return lower * torch.tensor(self.pieces, device=counts.device)


def zeros_at(sparsity: float, size: int) -> int:
    """How many of `size` weights a mask of this sparsity removes."""
    return math.ceil(sparsity * size)


class Threshold(NamedTuple):
    """Where a cut falls: all scores below `value` go, and the first `removed` of the `equal` ones that have it."""

    value: float
    removed: int
    equal: int


def keep_top(
    scores: Sequence[Tensor], zeros: int, *, shards: Shards | None = None, names: Sequence[str] | None = None
) -> list[Tensor]:
    """Masks (True: kept) that remove exactly the `zeros` smallest of all scores together.

    >>> keep_top([torch.tensor([3.0, 1.0]), torch.tensor([2.0, 2.0])], zeros=2)
    [tensor([ True, False]), tensor([False,  True])]
    """
    return list(each_mask(scores, select(scores, zeros, shards, names), shards))


def each_mask(scores: Sequence[Tensor], cut: Threshold, shards: Shards | None = None) -> Iterator[Tensor]:
    """The masks of a cut, one at a time, so that no second set of masks need exist."""
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


def select(scores: Sequence[Tensor], zeros: int, shards: Shards | None = None, names: Sequence[str] | None = None) -> Threshold:
    """The threshold that removes the `zeros` smallest scores."""
    if zeros <= 0:
        return Threshold(-math.inf, 0, 0)
    scores, rank = comparable(scores), zeros
    dtype, device = scores[0].dtype, scores[0].device
    flat = [storage_order(s) for s in scores]
    if shards:
        flat = [f if counted else f[:0] for f, counted in zip(flat, shards.counted())]
    count, bits = counter(flat)
    prefix = None  # the key's upper bits, as far as they are known
    for shift in range(dtype.itemsize * 8 - bits, -1, -bits):
        counts = count(shift, prefix).to(device)
        if shards:
            dist.all_reduce(counts, group=shards.group)
        bins, nan = np.split(counts.cpu().numpy(), [1 << bits])  # a sync, two or four to a cut
        if prefix is None:
            refuse_nan(nan, names)
        sums = bins.cumsum()
        digit = int(np.searchsorted(sums, rank))
        rank, equal = rank - int(sums[digit] - bins[digit]), int(bins[digit])
        prefix = digit - (1 << bits - 1) if prefix is None else prefix << bits | digit
    key = np.array([prefix], dtype=f"i{dtype.itemsize}")
    return Threshold(flip(key).view(f"f{dtype.itemsize}").item(), rank, equal)


Counter = Callable[[int, int | None], Tensor]


def counter(scores: Sequence[Tensor]) -> tuple[Counter, int]:
    """The way to count on the scores' device, and how many bits of a key one round of it decides.

    counter(shift, prefix) says how often each value of the bits at `shift` occurs in the keys whose higher bits are `prefix`,
    over all tensors; with no prefix it also says, in one more entry for each tensor, whether that has NaN in it.
    """
    if scores[0].is_cuda and len({s.device for s in scores}) == 1:
        try:
            from optg import kernels

            return partial(kernels.count, kernels.spans(scores), 8), 8
        except ImportError:  # no Triton on this platform
            pass
    return partial(count_in_chunks, scores, 16), 16


def count_in_chunks(scores: Sequence[Tensor], bits: int, shift: int, prefix: int | None) -> Tensor:
    """In numpy, on one thread: with torch's threads each of these short operations may wait for a busy core."""
    counts, nan = np.zeros(1 << bits, dtype=np.int64), np.zeros(len(scores), dtype=np.int64)
    for layer, score in enumerate(scores):
        for chunk in score.split(CHUNK) if len(score) else ():
            values = chunk.cpu().numpy()
            digits = keys(values)
            digits >>= shift
            if prefix is None:
                digits += 1 << bits - 1
                nan[layer] |= np.isnan(values.max())  # the maximum is NaN where any value is
            else:
                digits = digits[(digits >> bits) == prefix] & (1 << bits) - 1
            counts += np.bincount(digits, minlength=1 << bits)
    return torch.from_numpy(np.concatenate([counts, nan]))


def refuse_nan(found: np.ndarray, names: Sequence[str] | None) -> None:
    if found.any():
        where = ", ".join(names[i] if names else f"tensor {i}" for i in found.nonzero()[0].tolist())
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
    return score.permute(order).reshape(-1)


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


def norm(norms: Tensor, p: float, shards: Shards | None) -> Tensor:
    """The p-norm of tensors whose own p-norms these are; of the whole tensors, where each is a piece."""
    if shards is None:
        return torch.linalg.vector_norm(norms, p)
    if math.isinf(p):
        norms = norms.max()
        dist.all_reduce(norms, dist.ReduceOp.MAX, group=shards.group)
        return norms
    return shards.total(norms**p).sum() ** (1 / p)
