"""The maximum over a window of a value that lies pixel by pixel."""

from collections.abc import Callable
from ctypes import Structure, c_int64, c_uint8, c_void_p
from typing import TYPE_CHECKING

import numpy as np

from optg.deploy.engine.int8.base import Call, Places
from optg.deploy.engine.int8.pixels import Pixels, output_pixels, pixels_of
from optg.deploy.engine.int8.planes import LINE

if TYPE_CHECKING:
    from optg.deploy.engine.int8.pool import Pool


class PixelPoolStruct(Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("from_", "to", "taps", "inside", "holes")),
        *((name, c_int64) for name in ("hole_count", "positions", "count", "blocks")),
        ("fill", c_uint8),
    ]


def lay_out_pixels(op: "Pool", places: Places) -> Callable[[], list[Call]]:
    """Choose the places of input and output, as `Int8Op.lay_out` does."""
    source, before = pixels_of(places, op.inputs[0], op.quantized[0].zero_point)
    output, after = output_pixels(places, op)
    call = Call("int8_pool_pixels", output, [source], output.shape[0], lambda: make_struct(op, source, output), op=op)
    return lambda: [*before, call, *after]


def make_struct(op: "Pool", source: Pixels, output: Pixels) -> tuple[Structure, list[np.ndarray]]:
    window, shape = op.window, output.shape[1:]
    inside, shifts = [], []
    for axis in (0, 1):
        shift = np.arange(window.kernel[axis]) * window.dilation[axis] - window.padding[axis]
        place = np.arange(shape[axis])[:, None] * window.stride[axis] + shift
        inside.append((place >= 0) & (place < source.shape[1 + axis]))
        shifts.append(shift)
    all_inside = inside[0][:, None, :, None] & inside[1][None, :, None, :]  # rows × columns × kernel
    taps = (shifts[0][:, None] * source.columns + shifts[1]) * source.pixel
    arrays = [
        source.offsets(shape, window.stride),
        output.offsets(shape),
        taps.astype(np.int32).ravel(),
        np.broadcast_to(all_inside, (source.images, *all_inside.shape)).astype(np.uint8).ravel(),
        output.holes(),
    ]
    own = PixelPoolStruct(*(array.ctypes.data for array in arrays), len(arrays[-1]))
    own.positions, own.count, own.blocks, own.fill = arrays[1].size, taps.size, source.pixel // LINE, output.zero_point
    return own, arrays
