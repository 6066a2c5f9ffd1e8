"""The shapes that a network's usual operations compute, without asking torch.

torch knows them all, on its meta device, but the first question there imports two seconds' worth of modules: more than all else
that loading a model takes. A rule here answers for arguments in their plain form only; the rest, and whatever does not fit
together, is left to torch.
"""

from collections.abc import Callable
from math import prod
from typing import Any

import torch
from torch import Tensor

Shape = tuple[int, ...]


def shape_of(op: str, args: Any, kwargs: dict[str, Any]) -> Tensor | None:
    """The result as a tensor of the meta device, or None where no rule is sure."""
    tensors = [arg for arg in args if isinstance(arg, Tensor)]
    if op not in RULES or kwargs or not tensors or any(t.dtype != torch.float32 for t in tensors):
        return None
    try:
        shape = RULES[op](*args)
    except Exception:  # of arguments of another kind: torch says what is wrong with them
        return None
    if shape is None or min(shape, default=1) < 1:
        return None
    return torch.empty(shape, dtype=torch.float32, device="meta")


def same(x: Tensor) -> Shape:
    return tuple(x.shape)


def equals(x: Tensor, y: Tensor) -> Shape | None:
    return tuple(x.shape) if x.shape == y.shape else None


def conv2d(
    x: Tensor, w: Tensor, bias: Any = None, stride: Any = (1, 1), padding: Any = (0, 0), dilation: Any = (1, 1), groups: int = 1
) -> Shape | None:
    fits = x.ndim == w.ndim == 4 and groups > 0 and x.shape[1] == groups * w.shape[1] and w.shape[0] % groups == 0
    if not fits or not of_length(w.shape[0], bias):
        return None
    return x.shape[0], w.shape[0], *windows(x, tuple(w.shape[2:]), stride, padding, dilation)


def batch_norm(x: Tensor, weight: Any, bias: Any, mean: Tensor, var: Tensor, training: bool, *_: Any) -> Shape | None:
    known = training is False and None not in (mean, var) and of_length(x.shape[1], weight, bias, mean, var)
    return tuple(x.shape) if known and [type(v) for v in _] == [float, float, bool] else None


def linear(x: Tensor, w: Tensor, bias: Any = None) -> Shape | None:
    fits = w.ndim == 2 and x.ndim > 1 and x.shape[-1] == w.shape[1] and of_length(w.shape[0], bias)
    return (*x.shape[:-1], w.shape[0]) if fits else None


def max_pool2d(x: Tensor, kernel: Any, stride: Any = (), padding: Any = (0, 0), dilation: Any = (1, 1)) -> Shape | None:
    if x.ndim != 4 or any(2 * p > k for p, k in zip(pair(padding), pair(kernel))):
        return None
    return *x.shape[:2], *windows(x, kernel, stride if len(stride) else kernel, padding, dilation)


def adaptive_avg_pool2d(x: Tensor, size: Any) -> Shape | None:
    return (*x.shape[:2], *pair(size)) if x.ndim == 4 else None


def flatten(x: Tensor, first: int = 0, last: int = -1) -> Shape | None:
    last += x.ndim if last < 0 else 0
    return (*x.shape[:first], prod(x.shape[first : last + 1]), *x.shape[last + 1 :]) if 0 <= first <= last < x.ndim else None


def pair(value: Any) -> list[int]:
    """A size for height and width: two numbers, and not what is known later."""
    if len(value) != 2 or any(type(v) is not int for v in value):
        raise ValueError
    return value


def windows(x: Tensor, kernel: Any, stride: Any, padding: Any, dilation: Any) -> Shape:
    """Height and width of what windows over an image give."""
    sizes = zip(x.shape[-2:], *map(pair, (kernel, stride, padding, dilation)))
    return tuple((n + 2 * p - d * (k - 1) - 1) // s + 1 if min(k, s, d) > 0 and p >= 0 else 0 for n, k, s, p, d in sizes)


def of_length(count: int, *vectors: Tensor | None) -> bool:
    return all(v is None or tuple(v.shape) == (count,) for v in vectors)


RULES: dict[str, Callable[..., Shape | None]] = {
    **{f"aten.{name}.default": same for name in ("relu", "relu6", "sigmoid", "silu", "hardswish", "hardsigmoid", "tanh")},
    "aten.add.Tensor": equals,
    "aten.mul.Tensor": equals,
    "aten.conv2d.default": conv2d,
    "aten.batch_norm.default": batch_norm,
    "aten.linear.default": linear,
    "aten.max_pool2d.default": max_pool2d,
    "aten.adaptive_avg_pool2d.default": adaptive_avg_pool2d,
    "aten.flatten.using_ints": flatten,
}
