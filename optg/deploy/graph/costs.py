"""Upper bounds on the work and the temporary memory of an operation, from the shapes of its arguments and its result.

Work is counted in multiply-adds of a dense product in float32. Anything else handles fewer elements per second, so it counts
more for each.
"""

from collections.abc import Callable, Sequence
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

PER_ELEMENT = 16  # for each element that an operation reads or writes
PER_PIXEL = 1000  # for each pixel of a padded image: the engine plans where it lies
SLOWER = {torch.float64: 4, torch.float16: 8, torch.bfloat16: 8}  # products; many CPUs have no instructions for the last two


class Cost(NamedTuple):
    work: int
    temporary: int = 0  # elements


def cost_of(op: str, given: dict[str, Any], result: Any) -> Cost:
    """Return the work of an operation, and the bytes of its temporary memory."""
    inputs, outputs = tensors_in(list(given.values())), tensors_in(result)
    elements = sum(t.numel() for t in (*inputs, *outputs))
    rule = RULES.get(op.split(".")[1])
    if rule is None or not outputs:
        return Cost(PER_ELEMENT * elements)
    work, temporary = rule(given, outputs[0])
    dtype = outputs[0].dtype
    return Cost(work * SLOWER.get(dtype, 1) + PER_ELEMENT * elements, temporary * dtype.itemsize)


def tensors_in(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [tensor for item in value for tensor in tensors_in(item)] if isinstance(value, (list, tuple)) else []


def bytes_of(value: Any) -> int:
    """Return the bytes of all elements of a result. A view counts like a copy."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors_in(value))


def convolution(given: dict[str, Any], result: Tensor) -> Cost:
    return at_every_pixel(given, result, given["input"].shape)


def transposed_convolution(given: dict[str, Any], result: Tensor) -> Cost:
    return at_every_pixel(given, given["input"], result.shape)


def at_every_pixel(given: dict[str, Any], applied: Tensor, other: Sequence[int]) -> Cost:
    """Return the cost of applying all taps of a filter at every pixel of `applied`, to or from an image of the other shape."""
    weight, padding = given["weight"], given.get("padding", 0)
    axes, taps = weight.ndim - 2, prod(weight.shape[1:])
    images = applied.shape[0] if applied.ndim == weight.ndim else 1
    border = max(padding, default=0) if isinstance(padding, (list, tuple)) else padding if isinstance(padding, int) else 0
    columns = images * prod(applied.shape[-axes:]) * taps * given.get("groups", 1)  # torch may copy every window
    pixels = prod(n + 2 * border for n in other[-axes:])
    padded = images * prod(other[-axes - 1 : -axes]) * pixels
    return Cost(applied.numel() * taps + PER_ELEMENT * padded + PER_PIXEL * pixels, columns + padded)


def pooling(given: dict[str, Any], result: Tensor) -> Cost:
    kernel = given["kernel_size"]
    window = kernel * kernel if isinstance(kernel, int) else kernel[0] * kernel[-1]
    return Cost(PER_ELEMENT * window * result.numel() + PER_PIXEL * prod(given["self"].shape[-2:]))


def product(left: str, right: str) -> Callable[[dict[str, Any], Tensor], Cost]:
    """Return the rule for a product of these two arguments."""

    def rule(given: dict[str, Any], result: Tensor) -> Cost:
        a, b = given[left], given[right]
        inner = a.shape[-1] if a.ndim else 1
        copies = a.numel() + b.numel()
        if min(a.ndim, b.ndim) > 2:  # torch copies batches that it broadcasts
            copies = prod(result.shape[:-2]) * inner * sum(result.shape[-2:])
        return Cost(result.numel() * inner, copies)

    return rule


def einsum(given: dict[str, Any], result: Tensor) -> Cost:
    labels = given["equation"].replace(" ", "").partition("->")[0].split(",")
    sizes = {label: n for term, tensor in zip(labels, given["tensors"]) for label, n in zip(term, tensor.shape)}
    return Cost(prod(sizes.values()), sum(tensor.numel() for tensor in given["tensors"]) + result.numel())


def attention(given: dict[str, Any], result: Tensor) -> Cost:
    query, key = given["query"], given["key"]
    scores = prod(result.shape[:-1]) * key.shape[-2]
    return Cost(scores * (query.shape[-1] + result.shape[-1]), 3 * scores)


def bicubic(given: dict[str, Any], result: Tensor) -> Cost:
    return Cost(16 * PER_ELEMENT * result.numel())


RULES: dict[str, Callable[[dict[str, Any], Tensor], Cost]] = {
    **dict.fromkeys(("conv1d", "conv2d", "convolution"), convolution),
    "conv_transpose2d": transposed_convolution,
    **dict.fromkeys(("max_pool2d", "max_pool2d_with_indices", "avg_pool1d", "avg_pool2d"), pooling),
    "linear": product("input", "weight"),
    **dict.fromkeys(("mm", "bmm"), product("self", "mat2")),
    "matmul": product("self", "other"),
    "addmm": product("mat1", "mat2"),
    "baddbmm": product("batch1", "batch2"),
    "einsum": einsum,
    "scaled_dot_product_attention": attention,
    "upsample_bicubic2d": bicubic,
}
