"""Copies between torch's tensors and planes, and between planes of different layouts."""

from collections.abc import Callable
from ctypes import Structure, c_float, c_int64, c_void_p
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from optg.deploy.engine.build import Library
from optg.deploy.engine.int8.base import Call, CallerTensor, Int8Op, Places, Quantization
from optg.deploy.engine.int8.planes import Planes, PlanesStruct
from optg.deploy.engine.int8.selection import select_call, where_from


class CopyStruct(Structure):
    _fields_ = [
        ("in_", PlanesStruct), ("out", PlanesStruct),
        ("scale", c_float), ("zero_point", c_int64), ("number", c_int64),
        ("stride_row", c_int64), ("stride_column", c_int64), ("phases", c_int64), ("phase", c_void_p),
    ]  # fmt: skip


def struct(source: Planes | None, output: Planes | None, **more: Any) -> CopyStruct:
    views = {name: value.struct() for name, value in (("in_", source), ("out", output)) if value is not None}
    return CopyStruct(**views, **more)


def pack_call(tensor: CallerTensor, output: Planes, quantization: Quantization) -> Call:
    """Copy a torch tensor into the arena. Floats are quantized."""
    scale, zero_point = np.float32(1 / quantization.scale), quantization.zero_point
    return Call(
        "int8_pack", output, [tensor], output.shape[0],
        lambda: (struct(None, output, scale=scale, zero_point=zero_point, number=tensor.number), []),
    )  # fmt: skip


def unpack_call(source: Planes, tensor: CallerTensor, quantization: Quantization) -> Call:
    """Copy a value into a torch tensor. Bytes become floats if the tensor holds floats."""
    scale, zero_point = np.float32(quantization.scale), quantization.zero_point
    return Call(
        "int8_unpack" if source.number == 1 else "int8_unpack_reals", tensor, [source], source.shape[0],
        lambda: (struct(source, None, scale=scale, zero_point=zero_point, number=tensor.number), []),
    )  # fmt: skip


def split_call(
    source: Planes, output: Planes, stride: tuple[int, int], phases: list[tuple[int, int]], library: Library
) -> Call:
    """Copy every n-th row and column, once for each phase: a strided convolution then reads adjacent bytes."""
    if library.permutes:
        return select_call(source, output, lambda: [[where_from(source, output, stride, phase) for phase in phases]])
    table = np.array(phases, np.int32)
    steps = {"stride_row": stride[0], "stride_column": stride[1]}
    return Call(
        "int8_split", output, [source], source.shape[0],
        lambda: (struct(source, output, phases=len(phases), phase=table.ctypes.data, **steps), [table]),
    )  # fmt: skip


@dataclass
class Quantize(Int8Op):
    """Floats of a torch tensor -> bytes."""

    reads_tensors: ClassVar[bool] = True

    def lay_out(self, places: Places) -> Callable[[], list[Call]]:
        output = places.value(self.output, self.out.zero_point)
        return lambda: [pack_call(places.tensors[self.inputs[0]], output, self.out)]


@dataclass
class Dequantize(Int8Op):
    """Bytes -> floats of a torch tensor."""

    can_be_real: ClassVar[bool] = True

    def lay_out(self, places: Places) -> Callable[[], list[Call]]:
        source = places.value(self.inputs[0], self.quantized[0].zero_point)
        return lambda: [unpack_call(source, places.tensors[self.output], self.quantized[0])]


@dataclass
class Flatten(Int8Op):
    """Every pixel of every channel becomes a channel of its own."""

    def lay_out(self, places: Places) -> Callable[[], list[Call]]:
        source = places.value(self.inputs[0], self.quantized[0].zero_point)
        output = places.value(self.output, self.out.zero_point)
        return lambda: [Call("int8_flatten", output, [source], source.shape[0], lambda: (struct(source, output), []), op=self)]
