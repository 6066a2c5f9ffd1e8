"""Position by position: sums, functions by table, and concatenation, which rescales its inputs by table."""

from collections.abc import Callable
from ctypes import Structure, c_float, c_int64, c_uint8, c_void_p
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from optg.deploy.engine.int8.base import LARGEST_SUM, Call, Int8Op, Places, Quantization
from optg.deploy.engine.int8.planes import Part, Planes
from optg.deploy.engine.memory import Shape
from optg.deploy.engine.ops.base import Unsupported


class PointwiseStruct(Structure):
    _fields_ = [
        ("table", c_void_p), ("mask", c_void_p), ("plane", c_int64), ("lead", c_int64),
        *((name, c_float) for name in ("scale", "add_scale", "offset")),
        *((name, c_uint8) for name in ("low", "high", "fill")),
    ]  # fmt: skip


def struct(output: Planes, first: bool = True) -> tuple[PointwiseStruct, list[np.ndarray]]:
    """Return the C struct, with what it points to. The padding before the first plane belongs to the first part."""
    own = PointwiseStruct(plane=output.plane, lead=output.lead if first else 0, high=255, fill=output.zero_point)
    arrays = [output.pixels()] if output.fills else []
    own.mask = arrays[0].ctypes.data if arrays else None
    return own, arrays


def join(places: Places, op: Int8Op) -> tuple[Planes, list[Planes]]:
    """Return the output and the inputs, in one geometry."""
    output = places.value(op.output, op.out.zero_point)
    inputs = [places.value(name, q.zero_point) for name, q in zip(op.inputs, op.quantized)]
    for value in inputs:
        value.geometry.join(output.geometry)
    return output, inputs


@dataclass
class Add(Int8Op):
    """A sum of two values. Each is rescaled; the sum is rounded once."""

    def close(self, output: str, result: Quantization | None) -> None:
        """Exclude overflow, whatever the inputs are."""
        super().close(output, result)
        largest = 2 * 255 * sum(q.scale for q in self.quantized) / self.out.scale + 255
        if largest > LARGEST_SUM // 2:
            raise Unsupported("a rescaled sum may exceed 32 bits")

    @property
    def scales(self) -> tuple[np.float32, np.float32]:
        a, b = (np.float32(q.scale / self.out.scale) for q in self.quantized)
        return a, b

    @property
    def offset(self) -> np.float32:
        shares = (q.zero_point * float(scale) for q, scale in zip(self.quantized, self.scales))
        return np.float32(self.out.zero_point - sum(shares))

    def lay_out(self, places: Places) -> Callable[[], list[Call]]:
        output, inputs = join(places, self)
        return lambda: [Call("int8_add", output, inputs, output.shape[0], lambda: self.struct(output), self)]

    def struct(self, output: Planes) -> tuple[Structure, list[np.ndarray]]:
        own, arrays = struct(output)
        (own.scale, own.add_scale), own.offset, (own.low, own.high) = self.scales, self.offset, self.bounds
        return own, arrays


@dataclass
class Table(Int8Op):
    """A function of one value."""

    function: Callable[[Tensor], Tensor]
    label: str
    table: np.ndarray = field(init=False)

    can_clamp: ClassVar[bool] = False

    def close(self, output: str, result: Quantization | None) -> None:
        super().close(output, result)
        self.table = make_table(self.quantized[0], self.out, self.function)

    def lay_out(self, places: Places) -> Callable[[], list[Call]]:
        output, [source] = join(places, self)
        return lambda: [table_call(self, Part(output), source, self.table)]

    def describe(self, shape: Shape, choice: tuple[int, ...] | None) -> list[str]:
        name, _, *rest = super().describe(shape, choice)
        return [name, f"int8 {self.label}", *rest]


def make_table(source: Quantization, result: Quantization, function: Callable[[Tensor], Tensor]) -> np.ndarray:
    """Return the result for every byte, in torch's arithmetic."""
    reals = (torch.arange(256) - source.zero_point).float() * source.scale
    return quantize(function(reals), result).numpy()


def quantize(reals: Tensor, result: Quantization) -> Tensor:
    return (torch.round(reals * (1 / result.scale)) + result.zero_point).clamp(0, 255).to(torch.uint8)


def table_call(op: Int8Op, output: Part, source: Planes, table: np.ndarray) -> Call:
    def make() -> tuple[Structure, list[np.ndarray]]:
        own, arrays = struct(output.planes, output.channel == 0)
        own.table = table.ctypes.data
        return own, [*arrays, table]

    return Call("int8_table", output, [source], source.shape[0], make, op)


@dataclass
class Concat(Int8Op):
    """Inputs one after the other along the channels, each rescaled."""

    can_clamp: ClassVar[bool] = False

    def tables(self) -> list[np.ndarray]:
        return [make_table(q, self.out, lambda x: x) for q in self.quantized]

    def lay_out(self, places: Places) -> Callable[[], list[Call]]:
        output, inputs = join(places, self)
        starts = np.cumsum([0, *(value.shape[0] for value in inputs)])
        return lambda: [
            table_call(self, Part(output, int(start)), value, table)
            for start, value, table in zip(starts, inputs, self.tables())
        ]
