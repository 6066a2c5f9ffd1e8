"""The Triton kernels of the passes: each sweeps over all layers in one launch and reads and writes every entry once.

A program finds its block of work in a table (`optg.core.passes.tables`): the layer, start and length of the block, and the
address of each layer in every list. A kernel's docstring begins with the names of its lists. This file is long because
kernels cannot share bodies.
"""

import triton
import triton.language as tl


@triton.jit
def place(blocks, programs, ALIGN: tl.constexpr):
    """Return this program's layer, and the start and length of its block."""
    program = tl.program_id(0)
    start, length = tl.load(blocks + programs + program), tl.load(blocks + 2 * programs + program)
    return tl.load(blocks + program), tl.multiple_of(start, ALIGN), tl.multiple_of(length, ALIGN)


@triton.jit
def block(addresses, tensors, LIST: tl.constexpr, layer, start, TYPE: tl.constexpr, ALIGN: tl.constexpr):
    """Return a pointer to this program's block of a list. A thread takes 4 entries at once, the same ones of each list."""
    pointer = tl.load(addresses + LIST * tensors + layer).to(tl.pointer_type(TYPE))
    if ALIGN > 1:
        if TYPE == tl.int8:
            pointer = tl.multiple_of(pointer, 4)
        elif TYPE == tl.bfloat16 or TYPE == tl.float16:
            pointer = tl.multiple_of(pointer, 8)
        else:
            pointer = tl.multiple_of(pointer, 16)
    return pointer + start


@triton.jit(do_not_specialize=["programs", "tensors"])
def mask(
    blocks, addresses, programs, tensors, share, TYPE: tl.constexpr, BLANKS: tl.constexpr,
    ALIGN: tl.constexpr, BLOCK: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """targets, masks: multiply removed entries by a share, or blank them."""
    layer, start, length = place(blocks, programs, ALIGN)
    targets = block(addresses, tensors, 0, layer, start, TYPE, ALIGN)
    masks = block(addresses, tensors, 1, layer, start, tl.int8, ALIGN)
    for i in range(0, BLOCK, STEP):
        at = i + tl.arange(0, STEP)
        here = at < length
        target = tl.load(targets + at, mask=here, other=0.0)
        left = tl.zeros([STEP], TYPE) if BLANKS else (target.to(tl.float32) * share).to(TYPE)
        tl.store(targets + at, tl.where(tl.load(masks + at, mask=here, other=1) != 0, target, left), mask=here)


@triton.jit(do_not_specialize=["programs", "tensors"])
def restore(
    blocks, addresses, programs, tensors, TYPE: tl.constexpr,
    ALIGN: tl.constexpr, BLOCK: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """values, masks, latent: set removed weights to their latent values."""
    layer, start, length = place(blocks, programs, ALIGN)
    values = block(addresses, tensors, 0, layer, start, TYPE, ALIGN)
    masks = block(addresses, tensors, 1, layer, start, tl.int8, ALIGN)
    latents = block(addresses, tensors, 2, layer, start, TYPE, ALIGN)
    for i in range(0, BLOCK, STEP):
        at = i + tl.arange(0, STEP)
        here = at < length
        value, latent = tl.load(values + at, mask=here, other=0.0), tl.load(latents + at, mask=here, other=0.0)
        tl.store(values + at, tl.where(tl.load(masks + at, mask=here, other=1) != 0, value, latent), mask=here)


@triton.jit(do_not_specialize=["programs", "tensors"])
def settle(
    blocks, addresses, programs, tensors, TYPE: tl.constexpr,
    ALIGN: tl.constexpr, BLOCK: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """values, masks, latent: store the values, then zero the removed ones."""
    layer, start, length = place(blocks, programs, ALIGN)
    values = block(addresses, tensors, 0, layer, start, TYPE, ALIGN)
    masks = block(addresses, tensors, 1, layer, start, tl.int8, ALIGN)
    latents = block(addresses, tensors, 2, layer, start, TYPE, ALIGN)
    for i in range(0, BLOCK, STEP):
        at = i + tl.arange(0, STEP)
        here = at < length
        value = tl.load(values + at, mask=here, other=0.0)
        tl.store(latents + at, value, mask=here)
        tl.store(values + at, tl.where(tl.load(masks + at, mask=here, other=1) != 0, value, 0.0).to(TYPE), mask=here)


@triton.jit(do_not_specialize=["programs", "tensors"])
def filter_factors(
    blocks, addresses, programs, tensors, factors, TYPE: tl.constexpr,
    ALIGN: tl.constexpr, BLOCK: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """values, masks, latent: the factor of each filter that makes up for the magnitude its mask removes."""
    layer, start, length = place(blocks, programs, ALIGN)
    masks = block(addresses, tensors, 1, layer, start, tl.int8, ALIGN)
    latents = block(addresses, tensors, 2, layer, start, TYPE, ALIGN)
    whole, kept = tl.zeros([STEP], tl.float32), tl.zeros([STEP], tl.float32)
    for i in range(0, length, STEP):
        at = i + tl.arange(0, STEP)
        here = at < length
        magnitude = tl.abs(tl.load(latents + at, mask=here, other=0.0).to(tl.float32))
        whole += magnitude
        kept += tl.where(tl.load(masks + at, mask=here, other=0) != 0, magnitude, 0.0)
    share = (tl.sum(kept) / length) / (tl.sum(whole) / length + 1e-12)
    tl.store(factors + tl.program_id(0), 1.01 / (share + 0.01))


@triton.jit(do_not_specialize=["programs", "tensors"])
def soften(
    blocks, addresses, programs, tensors, thresholds, power, factors, sizes, TYPE: tl.constexpr, RESCALES: tl.constexpr,
    RATIOS: tl.constexpr, ALIGN: tl.constexpr, BLOCK: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """values, masks, latent, perhaps ratios: values <- soft threshold of the latent ones, 0 where removed."""
    layer, start, length = place(blocks, programs, ALIGN)
    values = block(addresses, tensors, 0, layer, start, TYPE, ALIGN)
    masks = block(addresses, tensors, 1, layer, start, tl.int8, ALIGN)
    latents = block(addresses, tensors, 2, layer, start, TYPE, ALIGN)
    threshold = tl.load(thresholds + layer)
    for i in range(0, BLOCK, STEP):
        at = i + tl.arange(0, STEP)
        here = at < length
        kept = tl.load(masks + at, mask=here, other=0) != 0
        latent = tl.load(latents + at, mask=here, other=1.0).to(tl.float32)
        if RATIOS:
            ratio = tl.load(block(addresses, tensors, 3, layer, start, TYPE, ALIGN) + at, mask=here, other=0.0).to(tl.float32)
        else:
            ratio = threshold / tl.where(kept, tl.abs(latent), 1.0)
        share = tl.minimum(ratio, 1.0)
        rest = 1.0 - tl.exp2(tl.log2(share) * power)  # log2(0) is −∞, and its power 0
        soft = latent * tl.exp2(tl.log2(rest) / power)
        if RESCALES:
            row = tl.load(sizes + layer) + (start + at) // tl.load(sizes + tensors + layer)
            soft = soft * tl.load(factors + row, mask=here, other=1.0)
        soft = tl.where(threshold > 0, soft, latent)
        tl.store(values + at, tl.where(kept, soft, 0.0).to(TYPE), mask=here)


@triton.jit(do_not_specialize=["programs", "tensors"])
def accumulate(
    blocks, addresses, programs, tensors, rates, momentum, TYPE: tl.constexpr,
    ALIGN: tl.constexpr, BLOCK: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """grads, masks, values, momenta, scores: OptG's Eq. 10 with momentum, then zero the gradients of removed weights."""
    layer, start, length = place(blocks, programs, ALIGN)
    grads = block(addresses, tensors, 0, layer, start, TYPE, ALIGN)
    masks = block(addresses, tensors, 1, layer, start, tl.int8, ALIGN)
    values = block(addresses, tensors, 2, layer, start, TYPE, ALIGN)
    momenta = block(addresses, tensors, 3, layer, start, tl.float32, ALIGN)
    scores = block(addresses, tensors, 4, layer, start, tl.float32, ALIGN)
    rate, inertia = tl.load(rates + layer), tl.load(momentum)
    for i in range(0, BLOCK, STEP):
        at = i + tl.arange(0, STEP)
        here = at < length
        grad, value = tl.load(grads + at, mask=here, other=0.0), tl.load(values + at, mask=here, other=0.0)
        m = inertia * tl.load(momenta + at, mask=here, other=0.0) + grad.to(tl.float32) * value.to(tl.float32)
        tl.store(momenta + at, m, mask=here)
        tl.store(scores + at, tl.load(scores + at, mask=here, other=0.0) - rate * m, mask=here)
        tl.store(grads + at, tl.where(tl.load(masks + at, mask=here, other=1) != 0, grad, 0.0).to(TYPE), mask=here)


@triton.jit(do_not_specialize=["programs", "tensors", "columns"])
def sum_signed(
    blocks, addresses, programs, tensors, sums, columns, TYPE: tl.constexpr,
    ALIGN: tl.constexpr, BLOCK: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """grads, masks, values: zero the gradients of removed weights and sum g · sign(w), block by block."""
    layer, start, length = place(blocks, programs, ALIGN)
    grads = block(addresses, tensors, 0, layer, start, TYPE, ALIGN)
    masks = block(addresses, tensors, 1, layer, start, tl.int8, ALIGN)
    values = block(addresses, tensors, 2, layer, start, TYPE, ALIGN)
    total = tl.zeros([STEP], tl.float32)
    for i in range(0, BLOCK, STEP):
        at = i + tl.arange(0, STEP)
        here = at < length
        grad, value = tl.load(grads + at, mask=here, other=0.0), tl.load(values + at, mask=here, other=0.0)
        grad = tl.where(tl.load(masks + at, mask=here, other=0) != 0, grad, 0.0).to(TYPE)
        tl.store(grads + at, grad, mask=here)
        grad, value = grad.to(tl.float32), value.to(tl.float32)
        total += tl.where(value > 0, grad, tl.where(value < 0, -grad, 0.0))
    tl.store(sums + layer * columns + start // BLOCK, tl.sum(total))


@triton.jit(do_not_specialize=["programs", "tensors", "shift"])
def count_digits(
    blocks, addresses, programs, tensors, prefixes, counts, nans, shift, EACH: tl.constexpr,
    FIRST: tl.constexpr, WIDTH: tl.constexpr, BITS: tl.constexpr, ALIGN: tl.constexpr, BLOCK: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """scores: count the digits at `shift` of the keys that begin with the prefix; mark tensors that hold NaN."""
    integer: tl.constexpr = tl.int64 if WIDTH == 64 else tl.int32
    lowest: tl.constexpr = -(1 << (WIDTH - 1))
    infinity: tl.constexpr = 0x7FF0000000000000 if WIDTH == 64 else 0x7F800000
    layer, start, length = place(blocks, programs, ALIGN)
    scores = block(addresses, tensors, 0, layer, start, integer, 1)  # a histogram takes one entry per thread
    group = layer if EACH else layer * 0
    prefix = tl.load(prefixes + group)
    bins = counts + (group << BITS)
    total = tl.zeros([1 << BITS], tl.int32)
    nan = 0
    for i in range(0, BLOCK, STEP):
        at = i + tl.arange(0, STEP)
        here = at < length
        bits = tl.load(scores + at, mask=here, other=0)
        bits = tl.where(bits == lowest, 0, bits)  # −0.0 is 0.0
        key = tl.where(bits < 0, bits ^ ~lowest, bits)  # signed integers in the order of the floats
        upper = key >> shift
        digit = (upper & ((1 << BITS) - 1)).to(tl.int32)
        if FIRST:
            nan = tl.maximum(nan, tl.max(((bits & ~lowest) > infinity).to(tl.int32)))
            digit = digit ^ (1 << (BITS - 1))  # the sign's bit: negative keys come first
        else:
            here = here & ((upper >> BITS) == prefix)
        total = tally(bins, total, digit, here, BITS, STEP)
    tl.atomic_add(bins + tl.arange(0, 1 << BITS), total.to(tl.int64), mask=total > 0)
    if nan > 0:
        tl.store(nans + layer, 1)


@triton.jit
def tally(bins, total, digit, here, BITS: tl.constexpr, STEP: tl.constexpr):
    """Count digits in this program's `total`; if they are too few for a histogram to pay, add them to `bins` directly."""
    found = tl.sum(here.to(tl.int32))
    if found * 32 > STEP:
        whole = tl.histogram(tl.where(here, digit, 0), 1 << BITS)
        total += tl.where(tl.arange(0, 1 << BITS) == 0, whole - (STEP - found), whole)
    elif found > 0:
        tl.atomic_add(bins + digit, tl.full([STEP], 1, tl.int64), mask=here)
    return total


@triton.jit(do_not_specialize=["groups"])
def narrow(counts, prefixes, ranks, found, groups, DIGITS: tl.constexpr, STEP: tl.constexpr):
    """Pick the next digit of the key at each rank; see `reference.narrow`."""
    group = tl.program_id(0)
    counts += group * DIGITS
    prefix, rank = tl.load(prefixes + group), tl.load(ranks + group)
    digit, below, seen = prefix * 0, prefix * 0, prefix * 0
    for i in range(0, DIGITS, STEP):
        count = tl.load(counts + i + tl.arange(0, STEP))
        lower = seen + tl.cumsum(count) < rank
        digit += tl.sum(lower.to(tl.int64))
        below += tl.sum(tl.where(lower, count, 0))
        seen += tl.sum(count)
    digit = tl.minimum(digit, DIGITS - 1)
    tl.store(found + group, prefix * DIGITS + digit)
    tl.store(found + groups + group, rank - below)
    tl.store(found + 2 * groups + group, tl.load(counts + digit))


@triton.jit
def index_of(place, index, tensors, layer):
    """Return the logical index of the entry at a place in a layer's memory."""
    plane, inner = tl.load(index + layer), tl.load(index + tensors + layer)
    row, rest = place // (plane * inner), place % (plane * inner)
    return tl.load(index + 2 * tensors + layer) + row * (plane * inner) + rest % inner * plane + rest // inner


@triton.jit(do_not_specialize=["programs", "tensors", "shift"])
def count_ties(
    blocks, addresses, programs, tensors, thresholds, split, index, prefixes, counts, shift, EACH: tl.constexpr,
    TYPE: tl.constexpr, BITS: tl.constexpr, ALIGN: tl.constexpr, BLOCK: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """masks, scores: count the digits at `shift` of the indices of scores at their threshold."""
    layer, start, length = place(blocks, programs, ALIGN)
    group = layer if EACH else layer * 0
    if tl.load(split + group) != 0:
        scores = block(addresses, tensors, 1, layer, start, TYPE, 1)  # four entries per thread would double the code
        threshold, prefix = tl.load(thresholds + group), tl.load(prefixes + group)
        bins = counts + (group << BITS)
        for i in range(0, BLOCK, STEP):
            at = i + tl.arange(0, STEP)
            here = at < length
            here = here & (tl.load(scores + at, mask=here, other=0.0) == threshold)
            if tl.sum(here.to(tl.int32)) > 0:
                upper = index_of(start + at, index, tensors, layer) >> shift
                digit = upper & ((1 << BITS) - 1)
                tl.atomic_add(bins + digit, tl.full([STEP], 1, tl.int64), mask=here & ((upper >> BITS) == prefix))


@triton.jit
def add_counts(counts, layer, zeros, removed, revived):
    """Add this program's counts of a change to those of its layer."""
    tl.atomic_add(counts + 3 * layer, zeros.to(tl.int64))
    tl.atomic_add(counts + 3 * layer + 1, removed.to(tl.int64))
    tl.atomic_add(counts + 3 * layer + 2, revived.to(tl.int64))


@triton.jit(do_not_specialize=["programs", "tensors"])
def write_masks(
    blocks, addresses, programs, tensors, thresholds, lasts, index, counts, TYPE: tl.constexpr, MAGNITUDES: tl.constexpr,
    ALIGN: tl.constexpr, BLOCK: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """masks, scores: keep scores above the threshold, and ties with an index above the last removed one; count changes."""
    layer, start, length = place(blocks, programs, ALIGN)
    masks = block(addresses, tensors, 0, layer, start, tl.int8, ALIGN)
    scores = block(addresses, tensors, 1, layer, start, TYPE, ALIGN)
    threshold, last = tl.load(thresholds + layer), tl.load(lasts + layer)
    zeros, removed, revived = 0, 0, 0
    for i in range(0, BLOCK, STEP):
        at = i + tl.arange(0, STEP)
        here = at < length
        before = tl.load(masks + at, mask=here, other=0) != 0
        score = tl.load(scores + at, mask=here, other=0.0)
        if MAGNITUDES:
            score = tl.abs(score.to(tl.float32))
        kept = score > threshold
        if last > -2:
            kept = kept | ((score == threshold) & (index_of(start + at, index, tensors, layer) > last))
        tl.store(masks + at, kept.to(tl.int8), mask=here)
        zeros += tl.sum((here & ~kept).to(tl.int32))
        removed += tl.sum((here & before & ~kept).to(tl.int32))
        revived += tl.sum((here & ~before & kept).to(tl.int32))
    add_counts(counts, layer, zeros, removed, revived)
