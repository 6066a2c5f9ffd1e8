"""Scores -> masks, exactly: the ⌈P·N⌉ smallest scores over all tensors go (Eq. 5), ties by index, lowest first.

A radix selection on the bits of the floats finds the largest score to remove: a histogram of the upper 16 bits, then of
the lower 16 among those that share the upper ones. It is linear, sorts nothing, joins no copy of the scores (it works
through small chunks), and gives the same masks on any device, layout and number of ranks: where the scores are shards,
only histograms and counts are exchanged.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

CHUNK = 1 << 18  # scores looked at together: they stay in cache, and are 1 % of a ResNet-50
BITS = 16  # of a score, decided in one round
INTEGER = {torch.float32: torch.int32, torch.float64: torch.int64}


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


def keep_top(
    scores: Sequence[Tensor], zeros: int, *, shards: Shards | None = None, names: Sequence[str] | None = None
) -> list[Tensor]:
    """Masks (True: kept) that remove exactly the `zeros` smallest of all scores together.

    >>> keep_top([torch.tensor([3.0, 1.0]), torch.tensor([2.0, 2.0])], zeros=2)
    [tensor([ True, False]), tensor([False,  True])]
    """
    return list(each_mask(scores, zeros, shards=shards, names=names))


def each_mask(
    scores: Sequence[Tensor], zeros: int, *, shards: Shards | None = None, names: Sequence[str] | None = None
) -> Iterator[Tensor]:
    """The masks of `keep_top`, one at a time, so that no second set of masks need exist."""
    dtype = torch.float64 if any(s.dtype == torch.float64 for s in scores) else torch.float32
    scores = [s.to(dtype) for s in scores]  # no copy of what is float32 already
    refuse_nan(scores, shards, names)
    if zeros <= 0:
        yield from (torch.ones_like(s, dtype=torch.bool) for s in scores)
        return
    value, removed, equal = select(scores, zeros, shards)
    tied = share_ties(scores, value, removed, shards) if removed < equal else [equal] * len(scores)
    for score, first in zip(scores, tied):
        mask = torch.gt(score, value)
        if removed < equal:
            keep_ties_after(first, score, value, mask)
        yield mask


def select(scores: Sequence[Tensor], rank: int, shards: Shards | None = None) -> tuple[float, int, int]:
    """The value of the rank-th smallest score; how many of the `rank` smallest have it; how many scores have it at all."""
    dtype = scores[0].dtype
    mine = [s for s, counted in zip(scores, shards.counted()) if counted] if shards else scores
    prefix = None  # the key's upper bits, as far as they are known
    for shift in range(dtype.itemsize * 8 - BITS, -1, -BITS):
        counts = torch.zeros(1 << BITS, dtype=torch.int64, device=scores[0].device)
        for score in mine:
            for chunk in storage_order(score).split(CHUNK):
                counts += histogram(keys(chunk), shift, prefix).to(counts.device)
        if shards:
            dist.all_reduce(counts, group=shards.group)
        sums = counts.cumsum(0)
        digit = int(torch.searchsorted(sums, rank))  # a sync, two or four to a cut
        rank, equal = rank - int(sums[digit] - counts[digit]), int(counts[digit])
        prefix = digit - (1 << BITS - 1) if prefix is None else prefix << BITS | digit
    return keys_to_floats(torch.tensor(prefix, dtype=INTEGER[dtype]), dtype).item(), rank, equal


def keys(scores: Tensor) -> Tensor:
    """Signed integers in the order of the scores. Adding 0.0 makes one zero of 0.0 and −0.0."""
    return flip((scores + 0.0).view(INTEGER[scores.dtype]))


def keys_to_floats(keys: Tensor, dtype: torch.dtype) -> Tensor:
    return flip(keys).view(dtype)


def flip(bits: Tensor) -> Tensor:
    """Invert all but the sign of negative floats, whose bits grow with their magnitude. Its own inverse; in place."""
    lower = (bits >> (bits.itemsize * 8 - 1)).bitwise_and_(torch.iinfo(bits.dtype).max)
    return bits.bitwise_xor_(lower)


def histogram(keys: Tensor, shift: int, prefix: int | None) -> Tensor:
    """How often each value of the BITS at `shift` occurs in keys whose higher bits are `prefix`."""
    digits = keys >> shift
    if prefix is None:
        digits += 1 << BITS - 1
        inside = None
    else:
        inside = (digits >> BITS) == prefix
        digits &= (1 << BITS) - 1
    if keys.device.type == "cpu":
        return torch.bincount(digits if inside is None else digits[inside], minlength=1 << BITS)
    # elsewhere selecting by a mask is a sync; histc passes over what is out of its range
    digits = digits.float() if inside is None else torch.where(inside, digits, -1).float()
    return torch.histc(digits, bins=1 << BITS, min=0, max=1 << BITS).long()


def storage_order(score: Tensor) -> Tensor:
    """All values in one dimension, with no copy where memory holds nothing else (channels_last, transposed)."""
    order = sorted(range(score.ndim), key=score.stride, reverse=True)
    return score.permute(order).reshape(-1)


def share_ties(scores: Sequence[Tensor], value: float, removed: int, shards: Shards | None) -> list[int]:
    """How many of the scores equal to `value` each tensor loses when the first `removed` of them all go."""
    device = scores[0].device
    equal = torch.tensor(
        [sum(int(c.eq(value).count_nonzero()) for c in storage_order(s).split(CHUNK)) for s in scores], device=device
    )
    whole = shards.total(equal) if shards else equal
    earlier = whole.cumsum(0) - whole
    if shards:
        earlier = earlier + shards.on_lower_ranks(equal)
    return torch.minimum((removed - earlier).clamp(min=0), equal).tolist()


def keep_ties_after(removed: int, score: Tensor, value: float, mask: Tensor) -> None:
    """Keep the scores equal to `value`, but for the first `removed` in logical (row-major) order."""
    rows = max(1, CHUNK // max(1, score[:1].numel()))
    for chunk, kept in zip(score.split(rows), mask.split(rows)):
        equal = chunk.eq(value).reshape(-1)
        places = equal.nonzero().flatten() if removed else equal.new_empty(0, dtype=torch.int64)
        equal[places[:removed]] = False
        kept |= equal.view(chunk.shape)
        removed = max(removed - len(places), 0)


def refuse_nan(scores: Sequence[Tensor], shards: Shards | None, names: Sequence[str] | None) -> None:
    """The maximum of a tensor is NaN where any of its values is."""
    found = torch.stack(
        [s.amax().isnan().to(scores[0].device) if s.numel() else s.new_zeros((), dtype=torch.bool) for s in scores]
    )
    if shards:
        found = shards.total(found.int())
    if bad := found.nonzero().flatten().tolist():
        where = ", ".join(names[i] if names else f"tensor {i}" for i in bad)
        raise FloatingPointError(f"NaN in the scores of {where}: training has diverged, no mask can be ranked from it")


def norm(norms: Tensor, p: float, shards: Shards | None) -> Tensor:
    """The p-norm of tensors whose own p-norms these are; of the whole tensors, where each is a piece."""
    if shards is None:
        return torch.linalg.vector_norm(norms, p)
    if math.isinf(p):
        norms = norms.max()
        dist.all_reduce(norms, dist.ReduceOp.MAX, group=shards.group)
        return norms
    return shards.total(norms**p).sum() ** (1 / p)
