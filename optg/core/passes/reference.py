"""The passes in torch operations, for any device: slow to launch on a GPU, and the definition of what `fused` computes.

All arguments are parallel lists with one tensor per layer. `masks` are True where a weight is kept.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from optg.core.ranking import Cuts, Threshold, Zeros, comparable, flat_scores, radix_select
from optg.core.sharding import Shards

CHUNK = 1 << 18  # scores read together: they stay in cache, and are 1 % of a ResNet-50
BITS = 16  # of a key that one round of the selection decides


class SoftThreshold(NamedTuple):
    """Shrink kept weights towards 0: sign(w) · (|w|ᵖ − tᵖ)^(1/p), with a threshold t per layer.

    With `rescale`, each filter is then multiplied by the inverse of the share of its magnitude that the mask keeps (ST-3).
    """

    thresholds: Tensor
    power: float
    rescale: bool = False


# ---- one step


def restore(values: Sequence[Tensor], masks: Sequence[Tensor], latent: Sequence[Tensor]) -> None:
    """Put the latent values of dormant weights back."""
    for value, mask, dormant in zip(values, masks, latent):
        torch.where(mask, value, dormant, out=value)


def settle(values: list[Tensor], masks: list[Tensor], latent: list[Tensor]) -> None:
    """Store all values in `latent`, then zero the removed ones."""
    torch._foreach_copy_(latent, values)
    mask(values, masks)


def mask(targets: Sequence[Tensor], masks: Sequence[Tensor], share: float = 0.0) -> None:
    """Multiply removed entries by `share`. Without a share they become 0.0, whatever they were (NaN, infinity, −0.0)."""
    for target, kept in zip(targets, masks):
        torch.where(kept, target, target * share if share else target.new_zeros(()), out=target)


def soften(
    values: list[Tensor],
    masks: list[Tensor],
    latent: list[Tensor],
    effective: Callable[[int, Tensor], Tensor],
    threshold: SoftThreshold | None,
) -> None:
    """Set values to `effective(layer, latent)`, then zero the removed ones.

    `threshold` describes the same function in numbers, if it is a soft threshold; `fused` computes that instead.
    """
    for layer, (value, source) in enumerate(zip(values, latent)):
        value.copy_(effective(layer, source))
    mask(values, masks)


def accumulate(
    grads: list[Tensor],
    masks: list[Tensor],
    values: list[Tensor],
    momenta: list[Tensor],
    scores: list[Tensor],
    rates: list[Tensor],
    momentum: float,
    skipped: Tensor | None,
) -> None:
    """Add OptG's criterion to the scores (Eq. 10 with momentum), then zero the gradients of removed weights.

    m ← μ·m + g·w, score ← score − η·m, with a learning rate per layer. If `skipped` is True on the device, gradients and rates
    are 0, and the momenta must stay as they are too.
    """
    torch._foreach_mul_(momenta, momentum if skipped is None else torch.where(skipped, 1.0, momentum))
    torch._foreach_addcmul_(momenta, grads, values)
    torch._foreach_addcmul_(scores, momenta, rates, value=-1.0)
    mask(grads, masks)


def sum_signed(grads: list[Tensor], masks: list[Tensor], values: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Zero the gradients of removed weights, then return Σ g · sign(w) of each layer."""
    mask(grads, masks)
    return [product.sum(dtype=dtype) for product in torch._foreach_mul(torch._foreach_sign(values), grads)]


# ---- a change of the mask


def select(scores: Sequence[Tensor], zeros: Zeros, shards: Shards | None = None) -> Cuts:
    """Find the threshold that removes the `zeros` smallest scores of all tensors together, or one threshold per tensor."""
    scores = comparable(scores)
    if isinstance(zeros, int):
        return select_together(scores, zeros, shards)
    wanted = zeros.tolist() if isinstance(zeros, Tensor) else zeros
    from optg.core.passes import choose  # on several GPUs each tensor is counted on its own

    cuts = [choose([s]).select([s], int(z), shards and shards.of([i])) for i, (s, z) in enumerate(zip(scores, wanted))]
    return Cuts(*(torch.cat([t.to(scores[0].device) for t in column]) for column in zip(*cuts)))


def write_masks(masks: Sequence[Tensor], scores: Sequence[Tensor], cuts: Cuts, shards: Shards | None = None) -> Tensor:
    """Overwrite the masks by cuts from `select`. Return how many weights of each layer are zero, newly removed and revived."""
    return torch.stack([overwrite(mask, new).to(masks[0].device) for mask, new in zip(masks, each_mask(scores, cuts, shards))])


def new_masks(scores: Sequence[Tensor], cuts: Cuts, shards: Shards | None = None) -> list[Tensor]:
    """Return new masks from cuts."""
    return list(each_mask(scores, cuts, shards))


def keep_above(masks: Sequence[Tensor], values: Sequence[Tensor], thresholds: Tensor) -> Tensor:
    """Overwrite the masks to keep magnitudes above their layer's threshold. Return counts as `write_masks` does."""
    new = (value.abs().to(thresholds.dtype) > t for value, t in zip(values, thresholds))
    return torch.stack([overwrite(mask, above).to(masks[0].device) for mask, above in zip(masks, new)])


def overwrite(mask: Tensor, new: Tensor) -> Tensor:
    """Copy a new mask over the old one. Return how many weights are zero, newly removed and revived."""
    before, both = mask.count_nonzero(), (mask & new).count_nonzero()
    after = mask.copy_(new).count_nonzero()
    return torch.stack([mask.numel() - after, before - both, after - both])


# ---- how a selection counts


def select_together(scores: Sequence[Tensor], zeros: int, shards: Shards | None) -> Cuts:
    """Find one threshold for all tensors."""
    flat = flat_scores(scores, shards)
    return radix_select(flat, [zeros], shards, partial(count_in_chunks, flat), narrow, BITS)


def count_in_chunks(scores: Sequence[Tensor], prefixes: Tensor, nan: Tensor, first: bool, shift: int) -> Tensor:
    """Count digits in numpy on one thread: torch's threads would wait for busy cores in each of these short operations."""
    counts, prefix = np.zeros(1 << BITS, dtype=np.int64), int(prefixes)
    for layer, score in enumerate(scores):
        for chunk in score.split(CHUNK) if len(score) else ():
            values = chunk.cpu().numpy()
            digits = keys(values)
            digits >>= shift
            if first:
                digits += 1 << BITS - 1
                if np.isnan(values.max()):  # the maximum is NaN if any value is
                    nan[layer] = 1
            else:
                digits = digits[(digits >> BITS) == prefix] & (1 << BITS) - 1
            counts += np.bincount(digits, minlength=1 << BITS)
    return torch.from_numpy(counts)[None].to(nan.device)


def narrow(counts: Tensor, prefixes: Tensor, ranks: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Pick the next digit of the key at each rank, given how often each digit occurs after its prefix.

    Return the longer prefix, the rank among the keys that share it, and the number of those keys.
    """
    sums = counts.cumsum(1)
    digits = torch.searchsorted(sums, ranks).clamp_(max=counts.shape[1] - 1)
    equal = counts.gather(1, digits)
    return prefixes * counts.shape[1] + digits, ranks - (sums.gather(1, digits) - equal), equal


def keys(scores: np.ndarray) -> np.ndarray:
    """Return signed integers in the order of the scores. Adding 0.0 turns −0.0 into 0.0."""
    bits = (scores + np.zeros((), scores.dtype)).view(f"i{scores.itemsize}")
    lower = bits >> (bits.itemsize * 8 - 1)  # the bits of negative floats grow with their magnitude: invert all but the sign
    lower &= np.iinfo(bits.dtype).max
    bits ^= lower
    return bits


# ---- how cuts become masks


def each_mask(scores: Sequence[Tensor], cuts: Cuts, shards: Shards | None = None) -> Iterator[Tensor]:
    """Yield the masks of cuts one at a time, so that no second set of masks is in memory."""
    found = cuts.on_host()
    if len(found) == 1:
        yield from masks_at(found[0], scores, shards)
    else:
        for i, (score, cut) in enumerate(zip(scores, found)):
            yield from masks_at(cut, [score], shards and shards.of([i]))


def masks_at(cut: Threshold, scores: Sequence[Tensor], shards: Shards | None) -> Iterator[Tensor]:
    """Yield the masks of one cut over all tensors."""
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


def share_ties(scores: Sequence[Tensor], cut: Threshold, shards: Shards | None) -> list[tuple[int, int]]:
    """Return for each tensor how many of its scores at the threshold go, and how many it has."""
    equal = torch.stack([s.eq(cut.value).count_nonzero().to(scores[0].device) for s in scores])
    whole = shards.total(equal) if shards else equal
    earlier = whole.cumsum(0) - whole
    if shards:
        earlier = earlier + shards.on_lower_ranks(equal)
    first = torch.minimum((cut.removed - earlier).clamp(min=0), equal)
    return list(zip(first.tolist(), equal.tolist()))


def keep_ties_after(removed: int, score: Tensor, value: float, mask: Tensor) -> None:
    """Keep the scores equal to `value`, except the first `removed` in logical (row-major) order."""
    rows = max(1, CHUNK // max(1, score[:1].numel()))
    for chunk, kept in zip(score.split(rows), mask.split(rows)):
        equal = chunk.eq(value).reshape(-1)
        places = equal.nonzero().flatten()
        equal[places[:removed]] = False
        kept |= equal.view(chunk.shape)
        removed = max(removed - len(places), 0)
