"""Values of bytes that lie pixel by pixel: all channels of a position, one after the other."""

from ctypes import Structure, c_int64, c_uint8, c_void_p
from dataclasses import dataclass

import numpy as np

from optg.deploy.engine.int8.base import Call, Int8Op, Places
from optg.deploy.engine.int8.planes import LINE, Planes


@dataclass(eq=False)
class Pixels(Planes):
    """One copy of a value in the arena. Padding separates rows and images, as in planes."""

    @property
    def pixel(self) -> int:
        """Bytes from one pixel to the next."""
        return -(-self.shape[0] // LINE) * LINE

    @property
    def lead(self) -> int:
        return (self.margin[0] * self.columns + self.margin[1]) * self.pixel

    @property
    def size(self) -> int:
        return self.lead + ((self.images + 1) * self.rows + 1) * self.columns * self.pixel

    def offsets(self, shape: tuple[int, int], stride: tuple[int, int] = (1, 1)) -> np.ndarray:
        """Return the bytes to every n-th pixel: images × rows × columns."""
        image, row, column = np.ogrid[: self.images, : shape[0], : shape[1]]
        pixels = (image * self.rows + row * stride[0]) * self.columns + column * stride[1]
        return (pixels * self.pixel).astype(np.int32)

    def holes(self) -> np.ndarray:
        """Return the padding before, between and after the pixels: pairs of the first byte and the length."""
        if not self.fills:
            return np.zeros((0, 2), np.int32)
        starts = self.offsets(self.shape[1:])[:, :, 0].ravel()
        ends = starts + self.shape[2] * self.pixel
        first = np.append(-self.lead, ends)
        last = np.append(starts, self.size - self.lead)
        return np.stack([first, last - first], axis=1).astype(np.int32)[last > first]

    def map_from(self, planes: Planes) -> np.ndarray:
        """Return, for each byte of a plane, the bytes to its pixel, or -1."""
        places = np.full((self.images, planes.rows, planes.columns), -1, np.int32)
        places[:, : self.shape[1], : self.shape[2]] = self.offsets(self.shape[1:])
        return np.pad(places.ravel(), (0, planes.plane - places.size), constant_values=-1)


class TurnStruct(Structure):
    _fields_ = [
        ("place", c_void_p), ("holes", c_void_p),
        *((name, c_int64) for name in ("hole_count", "channels", "plane", "lead")),
        ("fill", c_uint8),
    ]  # fmt: skip


def turn_call(source: Planes, output: Planes) -> Call:
    """Copy a value from planes to pixels, or back."""
    pixels, planes = (output, source) if isinstance(output, Pixels) else (source, output)
    assert isinstance(pixels, Pixels)

    def make() -> tuple[Structure, list[np.ndarray]]:
        arrays = [pixels.map_from(planes), pixels.holes()]
        own = TurnStruct(arrays[0].ctypes.data, arrays[1].ctypes.data, len(arrays[1]))
        own.channels, own.plane, own.fill = planes.shape[0], planes.plane, output.zero_point
        own.lead = planes.lead if planes.fills else 0
        return own, arrays

    return Call("int8_to_pixels" if output is pixels else "int8_from_pixels", output, [source], planes.shape[0], make)


def pixels_of(places: Places, name: str, zero_point: int) -> tuple[Pixels, list[Call]]:
    """Return a value's pixels, and the call that copies them from planes, if that is needed."""
    key = (name, "pixels")
    if key in places.known:
        found = places.known[key]
        assert isinstance(found, Pixels)
        return found, []
    made = places.known[key] = Pixels(places.shapes[name], places.images, zero_point)
    return made, [turn_call(places.value(name, zero_point), made)]


def output_pixels(places: Places, op: Int8Op) -> tuple[Pixels, list[Call]]:
    """Return the pixels that an operation writes, and the call that copies them to planes, if others need those."""
    made = places.known[op.output, "pixels"] = Pixels(places.shapes[op.output], places.images, op.out.zero_point)
    after = [turn_call(made, places.value(op.output, op.out.zero_point))] if op.output in places.needs_planes else []
    return made, after
