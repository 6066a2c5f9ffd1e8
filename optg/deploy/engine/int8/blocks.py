"""Blocks of weights: convolutions whose zeros come in 2 or 4 neighbouring input channels.

Such a layer reads a copy of its input in which the bytes of 2 or 4 channels lie side by side, position by position. So a
block needs one load where single weights need several, and the kernel interleaves less, or nothing.
"""

from ctypes import Structure, c_int64, c_uint8
from typing import TYPE_CHECKING

import numpy as np

from optg.deploy.engine.int8.base import Call, Places
from optg.deploy.engine.int8.planes import LINE, Planes
from optg.deploy.engine.int8.taps import GROUP

if TYPE_CHECKING:
    from optg.deploy.engine.int8.convolution import Convolution

SIZES = (1, 2, 4)
DENSE = 0.15  # density above which filters may share their taps
# Measured cycles on a vector of 64 positions: of 4 taps by the size of a block, without and with a shift; of 4 taps that
# filters share; of the rest of a filter; of the copy of a plane. Only ratios matter. Those of blocks are from a Zen 4 core, the
# others from Zen 5.
GROUP_CYCLES = {1: (5.0, 6.5), 2: (4.2, 5.8), 4: (3.5, 5.3)}
SHARED_CYCLES, FILTER_CYCLES, COPY_CYCLES = 2.7, 12.0, 3.6


class InterleaveStruct(Structure):
    _fields_ = [*((name, c_int64) for name in ("block", "channels", "phases", "plane", "lead")), ("fill", c_uint8)]


def in_blocks(weight: np.ndarray, size: int) -> np.ndarray:
    """Return weights (filters × channels × kernel) as filters × blocks at each tap × channels of a block."""
    filters, channels = weight.shape[:2]
    padded = np.pad(weight.reshape(filters, channels, -1), ((0, 0), (0, -channels % size), (0, 0)))
    return padded.reshape(filters, -1, size, padded.shape[2]).transpose(0, 1, 3, 2).reshape(filters, -1, size)


def groups_of_blocks(weight: np.ndarray, size: int) -> int:
    """Return the number of groups that the blocks with weights other than 0 need: a group has four weights of one filter."""
    nonzero = weight.reshape(*weight.shape[:2], -1) != 0
    used = nonzero[:, ::size].copy()
    for i in range(1, size):
        part = nonzero[:, i::size]
        used[:, : part.shape[1]] |= part
    return int((-(-used.sum(axis=(1, 2)) // (GROUP // size))).sum())


def expected_cycles(op: "Convolution", places: Places, size: int) -> float:
    """Return the expected cycles of a convolution on planes, if it reads blocks of this size."""
    _, height, width = places.shapes[op.output]
    vectors = -(-places.images * (height + (height > 1)) * (width + (width > 1)) // LINE)
    work = GROUP_CYCLES[size][op.window.kernel != (1, 1)] * op.groups_by_block[size]
    if size == 1:
        if op.groups == 1 and op.nonzero > DENSE * op.weight.size:
            work = min(work, SHARED_CYCLES * op.weight.size / GROUP)
        copy = 0.0
    else:
        copy = COPY_CYCLES * op.weight.shape[1] * op.groups
    return vectors * (work + FILTER_CYCLES * len(op.weight) + copy)


def block_size(op: "Convolution", places: Places) -> int:
    """Return the size of blocks with which a convolution on planes is expected to be fastest."""
    return min(op.groups_by_block, key=lambda size: expected_cycles(op, places, size))


def interleave_call(source: Planes, output: Planes, phases: int) -> Call:
    """Copy planes so that the bytes of neighbouring channels lie side by side.

    Args:
        phases: planes of each channel, which do not mix.
    """

    def make() -> tuple[Structure, list[np.ndarray]]:
        own = InterleaveStruct(output.number, source.shape[0] // phases, phases, source.plane, output.lead, source.zero_point)
        return own, []

    return Call("int8_interleave", output, [source], output.shape[0], make)
