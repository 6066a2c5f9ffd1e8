"""A convolution whose input and output lie pixel by pixel: faster where there are few positions."""

from collections.abc import Callable
from ctypes import Structure, c_float, c_int64, c_uint8, c_void_p
from typing import TYPE_CHECKING

import numpy as np

from optg.deploy.engine.int8.base import Call, Places
from optg.deploy.engine.int8.blocks import expected_cycles
from optg.deploy.engine.int8.picks import FILTERS, block_weights, make_picks, schedule
from optg.deploy.engine.int8.pixels import Pixels, output_pixels, pixels_of
from optg.deploy.engine.int8.planes import LINE, Planes

if TYPE_CHECKING:
    from optg.deploy.engine.int8.convolution import Convolution

MOST_POSITIONS = 8192  # of a layer that may run on pixels
# Measured cycles on pixels: to load a pick; for each position, of a pick, and of the rest of 16 filters.
LOAD_CYCLES, PICK_CYCLES, GROUP_CYCLES = 3.0, 1.1, 9.0
WORTH = 0.85  # pixels have to reduce the time to this: values may have to be copied

FILTERS_STRUCT = np.dtype([("picks", np.uint64), ("blocks", np.uint64), ("count", np.int64)])


class PixelConvolutionStruct(Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("filters", "start", "scale", "offset", "from_", "to", "added", "holes")),
        *((name, c_int64) for name in ("hole_count", "groups", "channels", "positions", "tile", "narrow", "real")),
        *((name, c_float) for name in ("residual", "real_low", "real_high")),
        *((name, c_uint8) for name in ("low", "high", "fill")),
    ]


def prefers_pixels(op: "Convolution", places: Places) -> bool:
    """Return whether a convolution is expected to be faster on pixels than on planes."""
    _, height, width = places.shapes[op.output]
    positions = places.images * height * width
    if not places.library.permutes or op.groups > 1 or positions > MOST_POSITIONS:
        return False
    picks = schedule(block_weights(op.weight)).picks
    per_position = PICK_CYCLES * int(picks.sum()) + GROUP_CYCLES * len(picks)
    on_planes = min(expected_cycles(op, places, size) for size in op.groups_by_block)
    return LOAD_CYCLES * int(picks.sum()) + positions * per_position < WORTH * on_planes


def lay_out_pixels(op: "Convolution", places: Places) -> Callable[[], list[Call]]:
    """Choose the places of inputs and output, as `Int8Op.lay_out` does."""
    source, before = pixels_of(places, op.inputs[0], op.quantized[0].zero_point)
    added = []
    for name, quantized in zip(op.inputs[1:], op.quantized[1:]):
        pixels, calls = pixels_of(places, name, quantized.zero_point)
        added.append(pixels)
        before += calls
    output, after = output_pixels(places, op) if op.result else (places.value(op.output, 0, 4), [])
    reserve(op, source, output)
    call = Call(
        "int8_pixels", output, [source, *added], output.shape[0],
        lambda: make_struct(op, source, output, added), op=op,
    )  # fmt: skip
    return lambda: [*before, call, *after]


def reserve(op: "Convolution", source: Pixels, output: Planes) -> None:
    """Make sure that rows and images are far enough apart for padding, and that it is filled if it is read."""
    before, sizes = [], []
    for axis in (0, 1):
        size, shifts = source.shape[1 + axis], op.shifts(axis)
        last = (output.shape[1 + axis] - 1) * op.window.stride[axis] + int(shifts.max())
        before.append(max(0, -int(shifts.min())))
        sizes.append(max(size + before[-1], last + 1))
    source.geometry.need(sizes[1], sizes[0])
    if any(before) or sizes[0] > source.shape[1] or sizes[1] > source.shape[2]:
        source.pad(*before)


def make_struct(op: "Convolution", source: Pixels, output: Planes, added: list[Pixels]) -> tuple[Structure, list[np.ndarray]]:
    shape = output.shape[1:]
    groups = -(-output.shape[0] // FILTERS)
    weights = block_weights(op.weight)
    picks = make_picks(weights, schedule(weights))
    per_tap = source.pixel // LINE
    taps = (op.shifts(0)[:, None] * source.columns + op.shifts(1)[None, :]).ravel() * source.pixel
    blocks = (taps[picks.blocks // per_tap] + LINE * (picks.blocks % per_tap)).astype(np.int32)
    filters = np.zeros(groups, FILTERS_STRUCT)
    before = np.cumsum(picks.counts) - picks.counts
    filters["picks"] = picks.table.ctypes.data + before * picks.table[:1].nbytes
    filters["blocks"] = blocks.ctypes.data + before * blocks.itemsize  # two blocks for every two picks
    filters["count"] = picks.counts

    how, tail = op.rescaling, (0, groups * FILTERS - output.shape[0])
    vectors = [np.pad(each, tail) for each in (how.start.astype(np.int32), how.scale, how.offset)]
    if isinstance(output, Pixels):
        to, holes = output.offsets(shape), output.holes()
    else:
        image, row, column = np.ogrid[: output.images, : shape[0], : shape[1]]
        to = (((image * output.rows + row) * output.columns + column) * output.number).astype(np.int32)
        holes = np.zeros((0, 2), np.int32)
    places = [source.offsets(shape, op.window.stride), to, *(each.offsets(shape) for each in added)]
    arrays = [picks.table, blocks, filters, *vectors, *places, holes]
    low, high = op.bounds if op.result else (0, 255)
    own = PixelConvolutionStruct(
        hole_count=len(holes), groups=groups, channels=output.shape[0], positions=to.size,
        tile=7 if to.size % 7 == 0 and to.size % 8 else 8, narrow=how.narrow, real=op.result is None,
        residual=how.residual, real_low=op.low, real_high=op.high, low=low, high=high, fill=output.zero_point,
    )  # fmt: skip
    own.filters, own.start, own.scale, own.offset = (array.ctypes.data for array in (filters, *vectors))
    own.from_, own.to, own.holes = places[0].ctypes.data, to.ctypes.data, holes.ctypes.data
    if added:
        own.added = places[2].ctypes.data
    return own, arrays
