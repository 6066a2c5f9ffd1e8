"""Copies between layouts, and between torch's tensors and the arena. Not lowered from a graph: plan.py inserts them."""

from ctypes import Structure, c_float, c_int64, c_void_p
from dataclasses import replace

import numpy as np

from optg.deploy.engine.layout import Layout
from optg.deploy.engine.memory import CallerTensor, Operand, Part, Place
from optg.deploy.engine.step import Step


class CopyStruct(Structure):
    _fields_ = [("moves", c_void_p), ("move_count", c_int64), ("fill_count", c_int64), ("fill", c_float)]


NOTHING = np.zeros((0,), np.int32)


def pack(place: Place, tensor: CallerTensor) -> Step:
    """Copy a torch tensor into the arena."""
    layout = place.layout
    return copy_step("pack", layout, place, tensor, layout.offsets(), tensor_offsets(tensor, layout, place.every))


def unpack(tensor: CallerTensor, place: Place) -> Step:
    """Copy a value from the arena into a torch tensor."""
    layout = place.layout.with_halo(place.layout.halo, None)
    to = tensor_offsets(tensor, layout, 1)
    return copy_step("unpack", layout, tensor, place, to, np.where(to < 0, -1, layout.offsets()))


def convert(place: Place, source: Place) -> Step:
    """Copy a value from another place, which has another layout."""
    layout = place.layout
    return copy_step("copy", layout, place, source, layout.offsets(), place_offsets(source.layout, layout, place.every))


def put_side_by_side(place: Place, source: Place) -> Step:
    """Copy the value of one image to its lanes among those of the other images. `fill_halo` has to follow."""
    layout = place.layout
    grid = layout.grid._replace(images=1)
    alone = replace(layout, grid=grid, lanes=grid.rows * grid.columns)  # the lanes of one image
    to, start = layout.offsets()[:, :, : alone.lanes], place_offsets(source.layout, alone, place.every)
    step = copy_step("side by side", layout, Part(place, per_image=4 * alone.lanes), source, to, start)
    step.fills_halo = False
    return step


def fill_halo(place: Place) -> Step:
    """Copy nothing: the C function ends by filling the halo."""
    return copy_step("halo", place.layout, place, place, NOTHING, NOTHING)


def copy_step(label: str, layout: Layout, output: Operand, source: Operand, to: np.ndarray, start: np.ndarray) -> Step:
    """Make a step that copies the number at `start` to `to`, for every number of a plane; negative starts are padding."""
    moves = np.stack([np.broadcast_to(to, start.shape).ravel(), start.ravel()], axis=1).astype(np.int32)
    inside = start.ravel() >= 0
    fills = moves[~inside] if layout.fill is not None else moves[:0]  # otherwise nothing reads padding
    table = np.concatenate([moves[inside], fills])
    own = CopyStruct(table.ctypes.data, int(inside.sum()), len(fills), layout.fill or 0.0)
    return Step("copy", label, layout, output, [source], own, [table])


def tensor_offsets(tensor: CallerTensor, layout: Layout, every: int) -> np.ndarray:
    """Return where every number of a plane lies in a torch tensor, in bytes from the channel's start; -1 for padding."""
    channels, height, width = tensor.shape
    image, pixel = np.divmod(layout.pixels, layout.height * layout.width)
    y, x = np.divmod(pixel, layout.width)
    return np.where(layout.pixels < 0, -1, 4 * ((image * channels * height + y * every) * width + x * every))


def place_offsets(source: Layout, target: Layout, every: int) -> np.ndarray:
    """Return where every number of the target's plane lies in the source's, in bytes from its start; -1 for padding."""
    table = np.full(source.grid.images * source.height * source.width, -1, np.int64)
    inside = source.pixels >= 0
    table[source.pixels[inside]] = source.offsets()[inside]
    image, pixel = np.divmod(target.pixels, target.height * target.width)
    y, x = np.divmod(pixel, target.width)
    index = (image * source.height + y * every) * source.width + x * every
    return np.where(target.pixels < 0, -1, table[np.where(target.pixels < 0, 0, index)])
