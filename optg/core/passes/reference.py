"""The passes in torch operations, for any device: slow to launch on a GPU, and the definition of what `fused` computes.

All arguments are parallel lists with one tensor per layer. `masks` are True where a weight is kept.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from operator import eq, ge, gt
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from optg.core.ranking import Cuts, Threshold, Zeros, comparable, flat_scores, radix_select
from optg.core.sharding import Shards

CHUNK = 1 << 18  # scores read at once, or weights that all operations of a pass visit together: they fit in cache
BITS = 16  # how many bits of a key one round of the selection decides
HAM_CLAMP = 2.0  # bounds α · sign(w) · g, before the learning rate multiplies it
STEP_CLAMP = 0.2  # bounds HAM's exponent if it follows from a step: HAM_CLAMP at a learning rate of 0.1
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by size in bytes


class SoftThreshold(NamedTuple):
    """Shrink kept weights towards 0: sign(w) · (|w|ᵖ − tᵖ)^(1/p), with a threshold t per layer.

    With `rescale`, each filter is then multiplied by the inverse of the share of its magnitude that the mask keeps (ST-3).
    """

    thresholds: Tensor
    power: float
    rescale: bool = False
    scales: Tensor | None = None  # a factor per layer (S-STE)
    ratios: list[Tensor] | None = None  # see `power_threshold`


def power_threshold(latent: Tensor, t: Tensor, p: float, ratio: Tensor | None = None) -> Tensor:
    """Return sign(w) · (|w|ᵖ − tᵖ)^(1/p) if |w| > t, else 0. At t = 0 return w itself, to the bit.

    `ratio` is t/|w|, or what stands for it where weights are removed together.
    """
    ratio = t / latent.abs() if ratio is None else ratio
    root = (1 - ratio.clamp(max=1.0) ** p) ** (1 / p)  # |w| · (1 − (t/|w|)ᵖ)^(1/p): exact for small numbers too
    return (latent * root).where(t > 0, latent).to(latent.dtype)


# ---- one step


def restore(values: Sequence[Tensor], masks: Sequence[Tensor], latent: Sequence[Tensor]) -> None:
    """Set dormant weights to their latent values."""
    for group in groups(values, masks, latent):
        for value, kept, dormant in zip(*group):
            replace_removed(value, kept, dormant)


def settle(values: list[Tensor], masks: list[Tensor], latent: list[Tensor]) -> None:
    """Store all values in `latent`, then zero the removed ones."""
    for group in groups(values, masks, latent):
        torch._foreach_copy_(group[2], group[0])
        for value, kept, _ in zip(*group):
            zero_removed(value, kept)


def mask(targets: Sequence[Tensor], masks: Sequence[Tensor], share: float = 0.0) -> None:
    """Multiply removed entries by `share`. Without a share they become 0.0, whatever they were (NaN, infinity, −0.0)."""
    for group in groups(targets, masks):
        for target, kept in zip(*group):
            if share:
                replace_removed(target, kept, target * share)
            else:
                zero_removed(target, kept)


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
    factor = momentum if skipped is None else torch.where(skipped, 1.0, momentum)
    rates = [rate.expand_as(score) for rate, score in zip(rates, scores)]
    for g, m, w, momentum_, score, η in groups(grads, masks, values, momenta, scores, rates):
        torch._foreach_mul_(momentum_, factor)
        torch._foreach_addcmul_(momentum_, g, w)
        torch._foreach_addcmul_(score, momentum_, η, value=-1.0)
        for grad, kept in zip(g, m):
            zero_removed(grad, kept)


def sum_signed(grads: list[Tensor], masks: list[Tensor], values: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Zero the gradients of removed weights, then return Σ g · sign(w) of each layer."""
    mask(grads, masks)
    return [product.sum(dtype=dtype) for product in torch._foreach_mul(torch._foreach_sign(values), grads)]


def scale_outputs(targets: Sequence[Tensor], factors: Sequence[Tensor]) -> None:
    """Multiply each tensor by a factor per output neuron, of a shape that broadcasts against it (SparseOpt)."""
    for target, factor in zip(targets, factors):
        target.mul_(factor)


def hyperbolic(
    values: Sequence[Tensor], before: Sequence[Tensor], grads: Sequence[Tensor], rates: Sequence[Tensor], alpha: float
) -> None:
    """Multiply values by exp(−η · clamp(α · sign(w) · g, ±2)), with w from before the optimizer's step (HAM)."""
    for value, old, grad, rate in zip(values, before, grads, rates):
        wide = torch.promote_types(value.dtype, torch.float32)
        exponent = (alpha * old.sign().to(wide) * grad).clamp(-HAM_CLAMP, HAM_CLAMP)
        value.mul_(torch.exp(exponent * -rate))


def rescale(
    values: Sequence[Tensor],
    masks: Sequence[Tensor],
    before: Sequence[Tensor],
    decays: Sequence[Tensor],
    factors: Sequence[Tensor] | None,
    share: float,
    strength: float,
) -> None:
    """Scale the step that an optimizer took, by `share` for removed weights and by a factor per output neuron.

    The step is values − (1 − decay) · before: what weight decay alone leaves is not scaled. A factor of 0 changes nothing: then
    the gradient was 0. Then multiply by exp(clamp(strength · sign(before) · scaled step, ±0.2)), which is HAM.
    """
    for i, (value, mask, old, decay) in enumerate(zip(values, masks, before, decays)):
        wide = torch.promote_types(value.dtype, torch.float32)
        now, old = value.to(wide), old.to(wide)
        factor = torch.full_like(old, share).masked_fill_(mask, 1.0)
        if factors is not None:
            factor = factor * factors[i]
        rest = old - decay * old
        step = factor * (now - rest)
        new = torch.where((factor == 0) | (factor == 1), now, rest + step)
        if strength:
            new = new * torch.exp((strength * old.sign() * step).clamp(-STEP_CLAMP, STEP_CLAMP))
        value.copy_(new)


def groups(*lists: Sequence[Tensor]) -> Iterator[tuple[list[Tensor], ...]]:
    """Yield the lists in groups that stay in the CPU's cache from one operation to the next; on a GPU all at once.

    A group has pieces of a large layer, or several small layers.
    """
    size = math.inf if any(tensor.is_cuda for tensor in lists[0]) else CHUNK * torch.get_num_threads()
    group, count = [], 0
    for layer in zip(*lists):
        first = layer[0]
        small = first.numel() <= size or first.ndim == 0
        for piece in (layer,) if small else zip(*(t.split(max(1, int(size) * len(first) // first.numel())) for t in layer)):
            group.append(piece)
            count += piece[0].numel()
            if count >= size:
                yield tuple(map(list, zip(*group)))
                group, count = [], 0
    if group:
        yield tuple(map(list, zip(*group)))


def zero_removed(target: Tensor, kept: Tensor) -> None:
    """Set removed entries to 0.0 by multiplying their bits: on a CPU, `where` takes 25 times as long for a random mask."""
    bits(target).mul_(kept.view(torch.int8))


def replace_removed(target: Tensor, kept: Tensor, other: Tensor) -> None:
    """Set removed entries to those of `other`."""
    bits(target).bitwise_xor_(bits(other)).mul_(kept.view(torch.int8)).bitwise_xor_(bits(other))


def bits(tensor: Tensor) -> Tensor:
    """Return a view of floats as integers."""
    return tensor.view(INTEGERS[tensor.element_size()])


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
    before, both = count(mask), count(mask & new)
    after = count(mask.copy_(new))
    return torch.stack([mask.numel() - after, before - both, after - both])


def count(mask: Tensor) -> Tensor:
    """Return how many entries are True. On a CPU, numpy counts 5 times as fast as torch."""
    return torch.tensor(np.count_nonzero(mask.numpy())) if mask.device.type == "cpu" else mask.count_nonzero()


def compare(operation: Callable[[Any, float], Any], scores: Tensor, value: float) -> Tensor:
    """Return where `operation` (gt, ge or eq) holds for the scores. On a CPU, numpy is 8 times as fast as torch."""
    if scores.device.type != "cpu":
        return operation(scores, value)
    return torch.from_numpy(operation(scores.detach().numpy(), value))


# ---- selection


def select_together(scores: Sequence[Tensor], zeros: int, shards: Shards | None) -> Cuts:
    """Find one threshold for all tensors."""
    flat = flat_scores(scores, shards)
    return radix_select(flat, [zeros], shards, partial(count_in_chunks, flat), narrow, BITS)


def count_in_chunks(scores: Sequence[Tensor], prefixes: Tensor, nan: Tensor, first: bool, shift: int) -> Tensor:
    """Count digits on one thread: torch's threads would wait for busy cores in each of these short operations."""
    counts, prefix = torch.zeros(1 << BITS, dtype=torch.int64), int(prefixes)
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
            counts += torch.bincount(
                torch.from_numpy(digits), minlength=1 << BITS
            )  # on one thread; numpy's takes twice as long
    return counts[None].to(nan.device)


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


# ---- masks from cuts


def each_mask(scores: Sequence[Tensor], cuts: Cuts, shards: Shards | None = None) -> Iterator[Tensor]:
    """Yield the masks of cuts one at a time, so that memory never holds a second set of masks."""
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
        yield from (compare(gt, s, cut.value) for s in scores)
    else:
        for score, (first, tied) in zip(scores, share_ties(scores, cut, shards)):
            mask = compare(ge if first == 0 else gt, score, cut.value)
            if 0 < first < tied:
                keep_ties_after(first, score, cut.value, mask)
            yield mask


def share_ties(scores: Sequence[Tensor], cut: Threshold, shards: Shards | None) -> list[tuple[int, int]]:
    """Return for each tensor how many of the scores that equal the threshold it loses, and how many it has."""
    equal = torch.stack([count(compare(eq, s, cut.value)).to(scores[0].device) for s in scores])
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
        equal = compare(eq, chunk, value).reshape(-1)
        places = equal.nonzero().flatten()
        equal[places[:removed]] = False
        kept |= equal.view(chunk.shape)
        removed = max(removed - len(places), 0)
