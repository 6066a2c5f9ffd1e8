"""Maximum and mean over a window, and mean over the whole image."""

from collections.abc import Callable
from ctypes import Structure, c_float, c_int64, c_void_p
from dataclasses import dataclass
from math import prod
from typing import ClassVar, Literal

import numpy as np

from optg.deploy.engine.int8.base import Call, Int8Op, Places, Quantization
from optg.deploy.engine.int8.pixel_pool import lay_out_pixels
from optg.deploy.engine.int8.planes import Planes, PlanesStruct
from optg.deploy.engine.int8.selection import select_call, where_from
from optg.deploy.engine.memory import Shape
from optg.deploy.engine.ops.base import Unsupported
from optg.deploy.engine.ops.pool import Pool as FloatPool
from optg.deploy.engine.ops.window import Window

LARGEST_ON_PIXELS = 256 << 10  # bytes of an input that may be pooled pixel by pixel: copying more takes too long
LARGEST_SELECTED = 1 << 17  # bytes of windows of a plane: the table of permutations has about as many bytes


class PoolStruct(Structure):
    _fields_ = [
        ("in_", PlanesStruct), ("out", PlanesStruct),
        *((f"{name}_{axis}", c_int64) for name in ("kernel", "stride", "padding", "dilation") for axis in ("row", "column")),
        ("scale", c_void_p), ("offset", c_float), ("zero_point", c_int64), ("mask", c_void_p),
    ]  # fmt: skip


@dataclass
class Pool(Int8Op):
    kind: Literal["max", "mean"]
    window: Window
    count_padding: bool = True
    divisor: int = 0

    can_clamp: ClassVar[bool] = False

    def close(self, output: str, result: Quantization | None) -> None:
        if self.kind == "max" and result != self.quantized[0]:
            raise Unsupported("its input and its output have different scales")
        super().close(output, result)

    def prefers_pixels(self, places: Places) -> bool:
        small = places.images * prod(places.shapes[self.inputs[0]]) <= LARGEST_ON_PIXELS
        return self.kind == "max" and places.library.permutes and small

    def lay_out(self, places: Places) -> Callable[[], list[Call]]:
        if self.output in places.on_pixels:
            return lay_out_pixels(self, places)
        source = places.value(self.inputs[0], self.quantized[0].zero_point)
        output = places.value(self.output, self.out.zero_point)
        shares = prod(self.window.kernel) * places.images * prod(places.shapes[self.output][1:])
        if self.kind == "max" and places.library.permutes and shares <= LARGEST_SELECTED:
            return lambda: self.select_calls(source, output)
        return lambda: [
            Call(self.function(source, output), output, [source], output.shape[0], lambda: self.struct(source, output), self)
        ]

    def select_calls(self, source: Planes, output: Planes) -> list[Call]:
        """Take the maximum over the rows of a window, then over its columns."""
        w = self.window
        rows, columns = ([k * d - p for k in range(n)] for n, d, p in zip(w.kernel, w.dilation, w.padding))
        maxima = Planes((*output.shape[:2], source.shape[2]), source.images, source.zero_point)
        down = [(row, 0) for row in rows]
        across = [(0, column) for column in columns]
        return [
            select_call(source, maxima, lambda: [[where_from(source, maxima, (w.stride[0], 1), first)] for first in down]),
            select_call(
                maxima, output, lambda: [[where_from(maxima, output, (1, w.stride[1]), first)] for first in across], self
            ),
        ]

    def function(self, source: Planes, output: Planes) -> str:
        whole = self.kind == "mean" and self.window.covers(source.shape, output.shape)
        return "int8_mean" if whole else f"int8_pool_{self.kind}"

    def factors(self, source: Shape, output: Shape) -> np.ndarray:
        """Return what a sum of bytes is multiplied by, for each output position."""
        counts = FloatPool("", [], "mean", self.window, self.count_padding, self.divisor).counts(source, output)
        return (self.quantized[0].scale / (self.out.scale * counts)).astype(np.float32)

    def struct(self, source: Planes, output: Planes) -> tuple[Structure, list[np.ndarray]]:
        window = self.window
        own = PoolStruct(source.struct(), output.struct(), *window.kernel, *window.stride, *window.padding, *window.dilation)
        own.offset, own.zero_point = self.out.zero_point, self.quantized[0].zero_point
        image = np.zeros((source.rows, source.columns), np.uint8)
        image[: source.shape[1], : source.shape[2]] = 255
        arrays = [np.pad(image.ravel(), (0, 64)), self.factors(source.shape, output.shape)]
        own.mask, own.scale = (array.ctypes.data for array in arrays)
        return own, arrays
