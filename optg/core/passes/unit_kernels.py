"""The Triton kernels of structures. Like those of `kernels`, each works on all layers in one launch.

The units of a layer are blocks of its weights; for N:M, its groups of M. They lie in a grid of up to three dimensions. The
table `units` has four rows for each dimension: units along it, length of a unit, stride in memory and length of the layer. Its
last row is the number of weights in a whole unit.
"""

import triton
import triton.language as tl

from optg.core.passes.kernels import add_counts, block, place


@triton.jit(do_not_specialize=["programs", "tensors"])
def protect(
    blocks, addresses, programs, tensors, lines, most, N: tl.constexpr, M: tl.constexpr, TYPE: tl.constexpr,
    ALIGN: tl.constexpr, BLOCK: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """scores, raised: copy scores; the N largest of M neighbours become infinite, all others finite. NaN stays."""
    layer, start, length = place(blocks, programs, ALIGN)
    scores = block(addresses, tensors, 0, layer, start, TYPE, ALIGN)
    raised = block(addresses, tensors, 1, layer, start, TYPE, ALIGN)
    stride, line = tl.load(lines + layer), tl.load(lines + tensors + layer)  # between neighbours, and of all inputs
    for i in range(0, length, STEP):
        at = i + tl.arange(0, STEP)
        here = at < length
        score = tl.load(scores + at, mask=here, other=0.0).to(tl.float32)
        input = (start % line + at).to(tl.int32) % line // stride
        member = input % M
        above = tl.zeros([STEP], tl.int32)
        for k in range(M):
            there = here & ((input - member + k) * stride < line)
            other = tl.load(scores + at + (k - member) * stride, mask=there, other=0.0).to(tl.float32)
            above += (there & ((other > score) | ((other == score) & (k > member)))).to(tl.int32)
        new = tl.where(above < N, float("inf"), tl.where(score > most, most, score))
        tl.store(raised + at, tl.where(score == score, new, score).to(TYPE), mask=here)


@triton.jit(do_not_specialize=["programs", "tensors"])
def scan(
    blocks, addresses, programs, tensors, found, TYPE: tl.constexpr, ALIGN: tl.constexpr, BLOCK: tl.constexpr,
    STEP: tl.constexpr,
):  # fmt: skip
    """values: mark layers that hold NaN, and find the bits of the largest finite magnitude of all."""
    layer, start, length = place(blocks, programs, ALIGN)
    values = block(addresses, tensors, 0, layer, start, TYPE, ALIGN)
    largest, nan = tl.zeros([STEP], tl.float32), 0
    for i in range(0, length, STEP):
        at = i + tl.arange(0, STEP)
        magnitude = tl.abs(tl.load(values + at, mask=at < length, other=0.0).to(tl.float32))
        nan = tl.maximum(nan, tl.max((magnitude != magnitude).to(tl.int32)))
        largest = tl.maximum(largest, tl.where(magnitude < float("inf"), magnitude, 0.0))
    tl.atomic_max(found + tensors, tl.max(largest).to(tl.int32, bitcast=True))
    if nan > 0:
        tl.store(found + layer, 1)


@triton.jit
def begin(rest, units, tensors, layer, DIM: tl.constexpr):
    """Split indices of units at their last dimension. Return the rest, and the first weight along that dimension."""
    row = units + 4 * DIM * tensors + layer
    count, side = tl.load(row), tl.load(row + tensors)
    return rest // count, rest % count * side


@triton.jit
def step_to(member, first, at, inside, units, tensors, layer, DIM: tl.constexpr):
    """Move from units' first weights to one of their members, along a dimension. Return the rest of the member's index, the
    place in memory and whether it is in the unit: units at the edge are smaller."""
    row = units + 4 * DIM * tensors + layer
    side, stride, length = tl.load(row + tensors), tl.load(row + 2 * tensors), tl.load(row + 3 * tensors)
    index = first + member % side
    return member // side, at + index * stride, inside & (index < length)


@triton.jit
def corner(unit, units, tensors, layer):
    """Return the first weight of units along each dimension."""
    rest, third = begin(unit, units, tensors, layer, 2)
    rest, second = begin(rest, units, tensors, layer, 1)
    rest, first = begin(rest, units, tensors, layer, 0)
    return first, second, third


@triton.jit
def member_of(member, first, second, third, here, units, tensors, layer):
    """Return the places of one member of each unit in memory, and whether it exists."""
    rest, at, inside = step_to(member, third, third * 0, here, units, tensors, layer, 2)
    rest, at, inside = step_to(rest, second, at, inside, units, tensors, layer, 1)
    rest, at, inside = step_to(rest, first, at, inside, units, tensors, layer, 0)
    return at, inside


@triton.jit
def encode(value, factor, limit):
    """Return floats as integers, like `FixedPoint.encode`."""
    scaled = value * factor
    scaled = tl.minimum(tl.where(scaled == scaled, tl.abs(scaled), 0.0), limit)
    whole = tl.where(scaled < 8388608.0, (scaled + 8388608.0) - 8388608.0, scaled).to(tl.int64)  # above 2²³ all are whole
    return tl.where(value < 0, -whole, whole)


@triton.jit(do_not_specialize=["programs", "tensors"])
def unit_means(
    blocks, addresses, programs, tensors, values, units, nans, scale, limit, TYPE: tl.constexpr,
    ALIGN: tl.constexpr, BLOCK: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """means: the mean of the values in each unit, NaN in layers that hold NaN."""
    layer, start, length = place(blocks, programs, ALIGN)
    means = block(addresses, tensors, 0, layer, start, tl.float64, 1)
    source = tl.load(values + layer).to(tl.pointer_type(TYPE))
    factor, nan, size = tl.load(scale), tl.load(nans + layer), tl.load(units + 12 * tensors + layer)
    for i in range(0, length, STEP):
        at = i + tl.arange(0, STEP)
        here = at < length
        first, second, third = corner((start + at).to(tl.int32), units, tensors, layer)
        total, count = tl.zeros([STEP], tl.int64), tl.zeros([STEP], tl.int32)
        for member in range(size):
            where, inside = member_of(member, first, second, third, here, units, tensors, layer)
            value = tl.load(source + where, mask=inside, other=0.0).to(tl.float32)
            total += encode(value, factor.to(tl.float32), limit)
            count += inside.to(tl.int32)
        mean = total.to(tl.float64) / tl.maximum(count, 1).to(tl.float64) / factor
        tl.store(means + at, tl.where(nan != 0, float("nan"), mean), mask=here)


@triton.jit(do_not_specialize=["programs", "tensors"])
def overwrite(
    blocks, addresses, programs, tensors, counts, ALIGN: tl.constexpr, BLOCK: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """masks, new: overwrite the masks by new ones; count changes."""
    layer, start, length = place(blocks, programs, ALIGN)
    masks = block(addresses, tensors, 0, layer, start, tl.int8, ALIGN)
    new = block(addresses, tensors, 1, layer, start, tl.int8, ALIGN)
    zeros, removed, revived = 0, 0, 0
    for i in range(0, BLOCK, STEP):
        at = i + tl.arange(0, STEP)
        here = at < length
        before = tl.load(masks + at, mask=here, other=0) != 0
        keep = tl.load(new + at, mask=here, other=0) != 0
        tl.store(masks + at, keep.to(tl.int8), mask=here)
        zeros += tl.sum((here & ~keep).to(tl.int32))
        removed += tl.sum((before & ~keep).to(tl.int32))
        revived += tl.sum((keep & ~before).to(tl.int32))
    add_counts(counts, layer, zeros, removed, revived)


@triton.jit(do_not_specialize=["programs", "tensors"])
def write_units(
    blocks, addresses, programs, tensors, masks, units, counts,
    ALIGN: tl.constexpr, BLOCK: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """kept: overwrite the masks of weights by those of units; count changes."""
    layer, start, length = place(blocks, programs, ALIGN)
    kept = block(addresses, tensors, 0, layer, start, tl.int8, 1)
    masks_at = tl.load(masks + layer).to(tl.pointer_type(tl.int8))
    size = tl.load(units + 12 * tensors + layer)
    zeros, removed, revived = 0, 0, 0
    for i in range(0, length, STEP):
        at = i + tl.arange(0, STEP)
        here = at < length
        keep = tl.load(kept + at, mask=here, other=0) != 0
        first, second, third = corner((start + at).to(tl.int32), units, tensors, layer)
        for member in range(size):
            where, inside = member_of(member, first, second, third, here, units, tensors, layer)
            before = tl.load(masks_at + where, mask=inside, other=0) != 0
            tl.store(masks_at + where, keep.to(tl.int8), mask=inside)
            zeros += tl.sum((inside & ~keep).to(tl.int32))
            removed += tl.sum((inside & before & ~keep).to(tl.int32))
            revived += tl.sum((inside & ~before & keep).to(tl.int32))
    add_counts(counts, layer, zeros, removed, revived)


@triton.jit(do_not_specialize=["programs", "tensors"])
def ratios(
    blocks, addresses, programs, tensors, units, thresholds, most, LARGEST: tl.constexpr, TYPE: tl.constexpr,
    ALIGN: tl.constexpr, BLOCK: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """latent, masks, ratios: threshold / magnitude. The magnitude is the mean of the unit; or, for N:M, the threshold is the
    largest removed magnitude of the group."""
    layer, start, length = place(blocks, programs, ALIGN)
    latents = block(addresses, tensors, 0, layer, 0, TYPE, 1)
    masks = block(addresses, tensors, 1, layer, 0, tl.int8, 1)
    found = block(addresses, tensors, 2, layer, 0, TYPE, 1)
    threshold, size = tl.load(thresholds + layer), tl.load(units + 12 * tensors + layer)
    for i in range(0, length, STEP):
        at = i + tl.arange(0, STEP)
        first, second, third = corner((start + at).to(tl.int32), units, tensors, layer)
        total, count = tl.zeros([STEP], tl.float32), tl.zeros([STEP], tl.float32)
        for member in range(size):
            where, inside = member_of(member, first, second, third, at < length, units, tensors, layer)
            magnitude = tl.abs(tl.load(latents + where, mask=inside, other=0.0).to(tl.float32))
            if LARGEST:
                kept = tl.load(masks + where, mask=inside, other=1) != 0
                total = tl.maximum(total, tl.where(kept, 0.0, magnitude))
            else:
                total += magnitude
            count += inside.to(tl.float32)
        for member in range(size):
            where, inside = member_of(member, first, second, third, at < length, units, tensors, layer)
            if LARGEST:
                over, under = total, tl.abs(tl.load(latents + where, mask=inside, other=1.0).to(tl.float32))
            else:
                over, under = tl.zeros([STEP], tl.float32) + threshold, total / tl.maximum(count, 1.0)
            ratio = tl.where(over > 0, tl.minimum(tl.div_rn(over, tl.where(over > 0, under, 1.0)), most), 0.0)
            tl.store(found + where, ratio.to(TYPE), mask=inside)
