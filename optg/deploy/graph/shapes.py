"""Output shapes of common operations, computed without torch's meta device.

The meta device knows every shape, but its first use imports modules for about two seconds, longer than the rest of loading a
model. The rules here cover float32 arguments in their most common form, and bytes. Everything else, including arguments that do
not fit together, is left to torch.
"""

from collections.abc import Callable
from math import prod
from typing import Any

import torch
from torch import Tensor

Shape = tuple[int, ...]
BYTES_TO_FLOATS = {"optg.dequantize_u8.default": torch.uint8, "optg.dequantize_s8.default": torch.int8}  # dtype of the first


def shape_of(op: str, args: Any, kwargs: dict[str, Any]) -> Tensor | None:
    """Return the result as a meta tensor, or None if no rule applies."""
    tensors = [arg for arg in args if isinstance(arg, Tensor)]
    expected = [BYTES_TO_FLOATS.get(op, torch.float32), *[torch.float32] * (len(tensors) - 1)]
    if op not in RULES or kwargs or not tensors or [t.dtype for t in tensors] != expected:
        return None
    try:
        shape = RULES[op](*args)
    except Exception:  # wrong arguments: torch reports what is wrong with them
        return None
    if shape is None or min(shape, default=1) < 1:
        return None
    dtype = torch.uint8 if op == "optg.quantize_u8.default" else torch.float32
    return torch.empty(shape, dtype=dtype, device="meta")


def elementwise(x: Tensor) -> Shape:
    return tuple(x.shape)


def elementwise_pair(x: Tensor, y: Tensor) -> Shape | None:
    return tuple(x.shape) if x.shape == y.shape else None


def quantized(x: Tensor, scale: float, zero_point: int) -> Shape | None:
    return tuple(x.shape) if (type(scale), type(zero_point)) == (float, int) else None


def quantized_weight(weight: Tensor, scale: Tensor) -> Shape | None:
    return tuple(weight.shape) if scale.shape == weight.shape[:1] else None


def conv2d(
    x: Tensor, w: Tensor, bias: Any = None, stride: Any = (1, 1), padding: Any = (0, 0), dilation: Any = (1, 1), groups: int = 1
) -> Shape | None:
    valid = x.ndim == w.ndim == 4 and groups > 0 and x.shape[1] == groups * w.shape[1] and w.shape[0] % groups == 0
    if not valid or not have_length(w.shape[0], bias):
        return None
    return x.shape[0], w.shape[0], *output_size(x, tuple(w.shape[2:]), stride, padding, dilation)


def batch_norm(x: Tensor, weight: Any, bias: Any, mean: Tensor, var: Tensor, training: bool, *rest: Any) -> Shape | None:
    valid = training is False and None not in (mean, var) and have_length(x.shape[1], weight, bias, mean, var)
    return tuple(x.shape) if valid and [type(v) for v in rest] == [float, float, bool] else None


def linear(x: Tensor, w: Tensor, bias: Any = None) -> Shape | None:
    valid = w.ndim == 2 and x.ndim > 1 and x.shape[-1] == w.shape[1] and have_length(w.shape[0], bias)
    return (*x.shape[:-1], w.shape[0]) if valid else None


def max_pool2d(x: Tensor, kernel: Any, stride: Any = (), padding: Any = (0, 0), dilation: Any = (1, 1)) -> Shape | None:
    if x.ndim != 4 or any(2 * p > k for p, k in zip(pair(padding), pair(kernel))):
        return None
    return *x.shape[:2], *output_size(x, kernel, stride if len(stride) else kernel, padding, dilation)


def adaptive_avg_pool2d(x: Tensor, size: Any) -> Shape | None:
    return (*x.shape[:2], *pair(size)) if x.ndim == 4 else None


def flatten(x: Tensor, first: int = 0, last: int = -1) -> Shape | None:
    last += x.ndim if last < 0 else 0
    return (*x.shape[:first], prod(x.shape[first : last + 1]), *x.shape[last + 1 :]) if 0 <= first <= last < x.ndim else None


def pair(value: Any) -> list[int]:
    """Return a (height, width) argument. Raise ValueError unless it is two integers."""
    if len(value) != 2 or any(type(v) is not int for v in value):
        raise ValueError
    return value


def output_size(x: Tensor, kernel: Any, stride: Any, padding: Any, dilation: Any) -> Shape:
    """Return height and width after sliding a window over an image."""
    sizes = zip(x.shape[-2:], *map(pair, (kernel, stride, padding, dilation)))
    return tuple((n + 2 * p - d * (k - 1) - 1) // s + 1 if min(k, s, d) > 0 and p >= 0 else 0 for n, k, s, p, d in sizes)


def have_length(count: int, *vectors: Tensor | None) -> bool:
    return all(v is None or tuple(v.shape) == (count,) for v in vectors)


RULES: dict[str, Callable[..., Shape | None]] = {
    **{
        f"aten.{name}.default": elementwise for name in ("relu", "relu6", "sigmoid", "silu", "hardswish", "hardsigmoid", "tanh")
    },
    "aten.add.Tensor": elementwise_pair,
    "aten.mul.Tensor": elementwise_pair,
    "aten.conv2d.default": conv2d,
    "aten.batch_norm.default": batch_norm,
    "aten.linear.default": linear,
    "aten.max_pool2d.default": max_pool2d,
    "aten.adaptive_avg_pool2d.default": adaptive_avg_pool2d,
    "aten.flatten.using_ints": flatten,
    "optg.quantize_u8.default": quantized,
    "optg.dequantize_u8.default": quantized,
    "optg.dequantize_s8.default": quantized_weight,
}
