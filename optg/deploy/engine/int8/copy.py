"""Copies between torch's tensors and planes, and between planes of different layouts."""

from collections.abc import Callable
from ctypes import Structure, c_float, c_int64, c_uint8, c_void_p
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from optg.deploy.engine.build import Library
from optg.deploy.engine.int8.base import Call, CallerTensor, Int8Op, Places, Quantization
from optg.deploy.engine.int8.planes import LINE, Planes, PlanesStruct


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
    table = np.array(phases, np.int32)

    def make() -> tuple[Structure, list[np.ndarray]]:
        if library.permutes:
            return selection(source, output, stride, phases)
        steps = {"stride_row": stride[0], "stride_column": stride[1]}
        return struct(source, output, phases=len(phases), phase=table.ctypes.data, **steps), [table]

    return Call("int8_select" if library.permutes else "int8_split", output, [source], source.shape[0], make)


class SelectionStruct(Structure):
    _fields_ = [("pieces", c_void_p), ("counts", c_void_p), ("vectors", c_int64), ("lead", c_int64), ("fill", c_uint8)]


PIECE = np.dtype([("from", np.int64), ("where", np.int64), ("index", np.uint8, LINE)])


def selection(
    source: Planes, output: Planes, stride: tuple[int, int], phases: list[tuple[int, int]]
) -> tuple[Structure, list[np.ndarray]]:
    """Return, for each vector of the output planes of one input plane, the pieces of the input that it is made of."""
    wanted = np.full((len(phases), output.plane), -1, np.int64)  # where each byte comes from; -1: padding
    for plane, (top, left) in zip(wanted, phases):
        image, row, column = np.ogrid[: source.images, top : source.shape[1] : stride[0], left : source.shape[2] : stride[1]]
        pixels = plane[: output.images * output.rows * output.columns].reshape(output.images, output.rows, output.columns)
        pixels[:, : row.size, : column.size] = (image * source.rows + row) * source.columns + column
    pieces: list[tuple[int, int, np.ndarray]] = []
    counts: list[int] = []
    for vector in wanted.reshape(-1, LINE):
        left_over, before = vector >= 0, len(pieces)
        while left_over.any():
            start = int(vector[left_over].min())
            here = left_over & (vector < start + LINE)
            where = int(np.packbits(here, bitorder="little").view(np.int64)[0])
            pieces.append((start, where, np.where(here, vector - start, 0)))
            left_over &= ~here
        counts.append(len(pieces) - before)
    arrays = [np.array(pieces, PIECE), np.array(counts, np.int32)]
    lead = output.lead if output.fills else 0
    own = SelectionStruct(arrays[0].ctypes.data, arrays[1].ctypes.data, len(counts), lead, output.zero_point)
    return own, arrays


@dataclass
class Quantize(Int8Op):
    """Floats of a torch tensor -> bytes."""

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
