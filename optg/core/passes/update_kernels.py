"""The Triton kernels of passes that change an optimizer's step: SparseOpt, HAM, and shares of dormant weights."""

import triton
import triton.language as tl

from optg.core.passes.kernels import block, place


@triton.jit
def output_factor(at, neurons, tensors, layer):
    """Return the factors of the output neurons that own the entries at places in a layer's memory."""
    factors = tl.load(neurons + layer).to(tl.pointer_type(tl.float32))
    outer, outer_size = tl.load(neurons + tensors + layer), tl.load(neurons + 2 * tensors + layer)
    inner, inner_size = tl.load(neurons + 3 * tensors + layer), tl.load(neurons + 4 * tensors + layer)
    return tl.load(factors + at // outer % outer_size * inner_size + at // inner % inner_size)


@triton.jit(do_not_specialize=["programs", "tensors"])
def scale_outputs(
    blocks, addresses, programs, tensors, neurons, TYPE: tl.constexpr,
    ALIGN: tl.constexpr, BLOCK: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """targets: multiply each entry by its output neuron's factor."""
    layer, start, length = place(blocks, programs, ALIGN)
    targets = block(addresses, tensors, 0, layer, start, TYPE, ALIGN)
    for i in range(0, BLOCK, STEP):
        at = i + tl.arange(0, STEP)
        here = at < length
        target = tl.load(targets + at, mask=here, other=0.0).to(tl.float32)
        tl.store(targets + at, (target * output_factor(start + at, neurons, tensors, layer)).to(TYPE), mask=here)


@triton.jit
def sign(value):
    return tl.where(value > 0, 1.0, tl.where(value < 0, -1.0, 0.0))


@triton.jit(do_not_specialize=["programs", "tensors"])
def hyperbolic(
    blocks, addresses, programs, tensors, rates, alpha, limit, TYPE: tl.constexpr,
    ALIGN: tl.constexpr, BLOCK: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """values, before, grads: HAM's multiplicative step by the gradient."""
    layer, start, length = place(blocks, programs, ALIGN)
    values = block(addresses, tensors, 0, layer, start, TYPE, ALIGN)
    olds = block(addresses, tensors, 1, layer, start, TYPE, ALIGN)
    grads = block(addresses, tensors, 2, layer, start, TYPE, ALIGN)
    rate = tl.load(rates + layer)
    for i in range(0, BLOCK, STEP):
        at = i + tl.arange(0, STEP)
        here = at < length
        old = tl.load(olds + at, mask=here, other=0.0).to(tl.float32)
        exponent = alpha * sign(old) * tl.load(grads + at, mask=here, other=0.0).to(tl.float32)
        exponent = tl.minimum(tl.maximum(exponent, -limit), limit)
        value = tl.load(values + at, mask=here, other=0.0).to(tl.float32)
        tl.store(values + at, (value * tl.exp(exponent * -rate)).to(TYPE), mask=here)


@triton.jit(do_not_specialize=["programs", "tensors"])
def rescale(
    blocks, addresses, programs, tensors, decays, neurons, share, strength, limit, TYPE: tl.constexpr, OUTPUTS: tl.constexpr,
    HAM: tl.constexpr, ALIGN: tl.constexpr, BLOCK: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """values, masks, before: scale the optimizer's step, then HAM's multiplicative step by it; see `reference.rescale`."""
    layer, start, length = place(blocks, programs, ALIGN)
    values = block(addresses, tensors, 0, layer, start, TYPE, ALIGN)
    masks = block(addresses, tensors, 1, layer, start, tl.int8, ALIGN)
    olds = block(addresses, tensors, 2, layer, start, TYPE, ALIGN)
    decay = tl.load(decays + layer)
    for i in range(0, BLOCK, STEP):
        at = i + tl.arange(0, STEP)
        here = at < length
        value = tl.load(values + at, mask=here, other=0.0).to(tl.float32)
        old = tl.load(olds + at, mask=here, other=0.0).to(tl.float32)
        factor = tl.where(tl.load(masks + at, mask=here, other=1) != 0, 1.0, share)
        if OUTPUTS:
            factor = factor * output_factor(start + at, neurons, tensors, layer)
        rest = old - decay * old
        step = factor * (value - rest)
        new = tl.where((factor == 0) | (factor == 1), value, rest + step)
        if HAM:
            new = new * tl.exp(tl.minimum(tl.maximum(strength * sign(old) * step, -limit), limit))
        tl.store(values + at, new.to(TYPE), mask=here)
