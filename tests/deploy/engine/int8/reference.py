"""The integer reference of docs/int8.md in numpy, operation by operation: slow, obvious, and written from the definition."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.ao.quantization.fx._decomposed
from torch import Tensor
from torch.nn import functional as F

from optg.deploy.engine.int8 import convolution, copy, pointwise, pool
from optg.deploy.engine.int8.base import Int8Op, Quantization
from optg.deploy.engine.int8.segment import Int8Segment
from optg.deploy.engine.memory import Shape

Arrays = dict[str, np.ndarray]


def multiply_add(a: Any, b: Any, c: Any) -> np.ndarray:
    """Return a · b + c of float32 numbers, rounded once to float32.

    The product is exact in float64. The sum is rounded to odd there: if it is inexact and its last bit is even, it moves by one
    unit towards the exact value. Rounding that to float32 gives the same as rounding the exact value.
    """
    product, c = np.float64(a) * np.float64(b), np.float64(c)
    total = product + c
    part = total - product
    error = (product - (total - part)) + (c - part)
    bits = np.atleast_1d(total).view(np.int64)
    even = (bits & 1) == 0
    odd = np.where(even & (np.atleast_1d(error) != 0), np.nextafter(total, np.where(error > 0, np.inf, -np.inf)), total)
    return odd.reshape(np.shape(total)).astype(np.float32)


def round_and_clamp(reals: np.ndarray, low: int = 0, high: int = 255) -> np.ndarray:
    return np.clip(np.rint(reals.astype(np.float64)), low, high).astype(np.uint8)


def bound(real: float, q: Quantization) -> int:
    return int(np.clip(np.rint(real / q.scale) + q.zero_point, 0, 255))


def per_channel(values: Any) -> np.ndarray:
    return np.asarray(values)[None, :, None, None]


def run_convolution(op: convolution.Convolution, shape: Shape, x: np.ndarray, *added: np.ndarray) -> np.ndarray:
    source, window = op.quantized[0], op.window
    out = op.result or Quantization(1.0, 0)
    top, left = window.padding
    bottom, right = (max(0, window.last_read(shape[1 + axis], axis) + 1 - x.shape[2 + axis]) for axis in (0, 1))
    padded = F.pad(torch.from_numpy(x).double(), (left, right, top, bottom), value=source.zero_point)
    weight = torch.from_numpy(op.weight).double()
    sums = F.conv2d(padded, weight, None, window.stride, 0, window.dilation, op.groups).numpy().astype(np.int64)
    sums = sums[:, :, : shape[1], : shape[2]] - per_channel(source.zero_point * op.weight.astype(np.int64).sum(axis=(1, 2, 3)))
    assert np.abs(sums).max(initial=0) < 2**31
    scale = np.float32(source.scale * op.weight_scale / out.scale)
    factor = np.float32(op.quantized[1].scale / out.scale) if added else np.float32(0)
    correction = op.quantized[1].zero_point * float(factor) if added else 0.0
    offset = np.float32(op.bias / out.scale + out.zero_point - correction)
    if op.result is not None and (constants := narrow_constants(op, scale, factor, op.bias / out.scale - correction)):
        scale, start, offset = constants
        reals = (sums + per_channel(start) + 1.5 * 2**23).astype(np.float32)
        if not added:
            rounded = multiply_add(reals, per_channel(scale), per_channel(offset))
            return round_and_clamp(rounded - np.float32(1.5 * 2**23), bound(op.low, out), bound(op.high, out))
        y = multiply_add(added[0].astype(np.float32), factor, multiply_add(reals, per_channel(scale), per_channel(offset)))
        return round_and_clamp(y, bound(op.low, out), bound(op.high, out))
    y = multiply_add(sums.astype(np.float32), per_channel(scale), per_channel(offset))
    for r in added:
        y = multiply_add(r.astype(np.float32), factor, y)
    if op.result is None:
        return np.clip(y, np.float32(op.low), np.float32(op.high))
    return round_and_clamp(y, bound(op.low, out), bound(op.high, out))


def narrow_constants(
    op: convolution.Convolution, scale: np.ndarray, factor: np.float32, real: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray] | None:
    """Return the scales, the whole numbers to add to the sums and the offsets of a narrow layer; None if it is not narrow."""
    scale, starts, offsets, magic = scale.copy(), [], [], 1.5 * 2**23
    for channel, filter in enumerate(op.weight.astype(np.int64)):
        if scale[channel] < 2**-21 and 255 * np.abs(filter).sum() * 2**-21 <= 2**-5:
            scale[channel] = 2**-21
        s, c = float(scale[channel]), float(real[channel]) + op.out.zero_point
        exact = c - magic * s + (0.0 if len(op.inputs) > 1 else magic)
        nearest = np.float32(exact)
        best = np.inf
        for step in sorted(range(-64, 65), key=abs):
            candidate = np.float32(float(nearest) + step * float(np.spacing(nearest)))
            number = np.rint((exact - float(candidate)) / s)
            error = abs(exact - float(candidate) - number * s)
            if error < best and (step == 0 or abs(number) <= 2**20):
                best, offset, start = error, candidate, number
        corrected = start - op.quantized[0].zero_point * filter.sum()
        largest = max(abs(corrected + 255 * filter[filter < 0].sum()), abs(corrected + 255 * filter[filter > 0].sum()))
        if largest >= 2**22 or largest * s + abs(c) + 255 + 255 * float(factor) >= 2**15 or s > 2**-5:
            return None
        starts.append(start)
        offsets.append(offset)
    return scale, np.array(starts), np.array(offsets)


def run_add(op: pointwise.Add, shape: Shape, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    out = op.out
    scales = [np.float32(q.scale / out.scale) for q in op.quantized]
    offset = np.float32(out.zero_point - sum(q.zero_point * float(s) for q, s in zip(op.quantized, scales)))
    y = multiply_add(a.astype(np.float32), scales[0], offset)
    return round_and_clamp(multiply_add(b.astype(np.float32), scales[1], y), bound(op.low, out), bound(op.high, out))


def run_pool(op: pool.Pool, shape: Shape, x: np.ndarray) -> np.ndarray:
    batch, channels, height, width = x.shape
    result = np.zeros((batch, *shape), np.uint8)
    for row in range(shape[1]):
        for column in range(shape[2]):
            ys, xs = (
                [i for i in (p * s - pad + np.arange(k) * d) if 0 <= i < n]
                for p, s, pad, k, d, n in zip(
                    (row, column), op.window.stride, op.window.padding, op.window.kernel, op.window.dilation, (height, width)
                )
            )
            seen = x[:, :, ys][:, :, :, xs].reshape(batch, channels, -1).astype(np.int64)
            if op.kind == "max":
                result[:, :, row, column] = seen.max(axis=2)
            else:
                pixels = counted(op, row, column, height, width, len(ys) * len(xs))
                scale = np.float32(op.quantized[0].scale / (op.out.scale * pixels))
                sums = (seen - op.quantized[0].zero_point).sum(axis=2)
                result[:, :, row, column] = round_and_clamp(multiply_add(sums.astype(np.float32), scale, op.out.zero_point))
    return result


def counted(op: pool.Pool, row: int, column: int, height: int, width: int, inside: int) -> int:
    if op.divisor or not op.count_padding:
        return op.divisor or inside
    ends = [
        min(p * s - pad + k, n + pad) - (p * s - pad)
        for p, s, pad, k, n in zip((row, column), op.window.stride, op.window.padding, op.window.kernel, (height, width))
    ]
    return ends[0] * ends[1]


def run_table(op: pointwise.Table, shape: Shape, x: np.ndarray) -> np.ndarray:
    reals = (torch.from_numpy(x).int() - op.quantized[0].zero_point).float() * op.quantized[0].scale
    return quantize_in_torch(op.function(reals), op.out)


def quantize_in_torch(reals: torch.Tensor, q: Quantization) -> np.ndarray:
    return torch.ops.quantized_decomposed.quantize_per_tensor(reals, q.scale, q.zero_point, 0, 255, torch.uint8).numpy()


def run_concat(op: pointwise.Concat, shape: Shape, *parts: np.ndarray) -> np.ndarray:
    reals = [(torch.from_numpy(x).int() - q.zero_point).float() * q.scale for x, q in zip(parts, op.quantized)]
    return np.concatenate([quantize_in_torch(each, op.out) for each in reals], axis=1)


def run_quantize(op: copy.Quantize, shape: Shape, x: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):
        y = np.nan_to_num(x * np.float32(1 / op.out.scale), nan=-1e9, posinf=1e9, neginf=-1e9)
    return np.clip(np.rint(y.astype(np.float64)) + op.out.zero_point, 0, 255).astype(np.uint8)


def run_dequantize(op: copy.Dequantize, shape: Shape, x: np.ndarray) -> np.ndarray:
    return (x.astype(np.int32) - op.quantized[0].zero_point).astype(np.float32) * np.float32(op.quantized[0].scale)


RUN: dict[type[Int8Op], Callable[..., np.ndarray]] = {
    convolution.Convolution: run_convolution,
    pointwise.Add: run_add,
    pointwise.Table: run_table,
    pointwise.Concat: run_concat,
    pool.Pool: run_pool,
    copy.Quantize: run_quantize,
    copy.Dequantize: run_dequantize,
    copy.Flatten: lambda op, shape, x: x.reshape(len(x), *shape),
}


def run_segment(segment: Int8Segment, values: Arrays) -> Arrays:
    """Return all values that a segment computes, as images × channels × height × width."""
    values = {name: np.asarray(value).reshape(len(value), *segment.shapes[name]) for name, value in values.items()}
    for op in segment.ops:
        values[op.output] = RUN[type(op)](op, segment.shapes[op.output], *(values[name] for name in op.inputs))
    return values


def compare_runs(monkeypatch: pytest.MonkeyPatch) -> Arrays:
    """Compare every run of a segment with the reference, bit by bit. Return a dict of the values that were computed."""
    values: Arrays = {}
    run = Int8Segment.run

    def run_and_compare(self: Int8Segment, value: Callable[[str], Tensor], batch: int, runner: Any) -> dict[str, Tensor]:
        made = run(self, value, batch, runner)
        expected = run_segment(self, {name: value(name).numpy() for name in self.inputs})
        for name, got in made.items():
            assert torch.equal(got, torch.from_numpy(expected[name]).reshape(got.shape)), name
        values.update(expected)
        return made

    monkeypatch.setattr(Int8Segment, "run", run_and_compare)
    return values
