"""The layout that convolutions and poolings share: each output position reads a window of the input."""

from math import prod
from typing import NamedTuple

from optg.deploy.engine.layout import NO_HALO, Grid, Halo
from optg.deploy.engine.memory import Form, Place, Places, Shape
from optg.deploy.engine.ops.base import Op, Pair, Unsupported

MOST_PADDED, SMALL_AREA = 4, 2**14  # an image with its padding has at most 4 times its own pixels, or a few more


class Window(NamedTuple):
    kernel: Pair
    stride: Pair = (1, 1)
    padding: Pair = (0, 0)  # at the top and left; the other sides follow from the output's size
    dilation: Pair = (1, 1)

    def last_read(self, outputs: int, axis: int) -> int:
        """Return the last input row (or column) that this many output rows read; the first pixel is 0."""
        return (outputs - 1) * self.stride[axis] - self.padding[axis] + (self.kernel[axis] - 1) * self.dilation[axis]

    def bounded(self, source: Shape, output: Shape) -> "Window":
        """Return a window that needs little memory beside the image. Raise Unsupported if most of what it reads is padding."""
        ends = [max(source[1 + axis], self.last_read(output[1 + axis], axis) + 1) for axis in (0, 1)]
        area = prod(end + padding for end, padding in zip(ends, self.padding))
        if area > MOST_PADDED * source[1] * source[2] + SMALL_AREA:
            raise Unsupported("it reads much more padding than image")
        rows, columns = (1 if n == 1 else step for n, step in zip(output[1:], self.stride))  # one position makes no step
        return self._replace(stride=(rows, columns))

    def covers(self, source: Shape, output: Shape) -> bool:
        """Whether its only position is the whole image."""
        return self.kernel == source[1:] and output[1:] == (1, 1) and self.padding == (0, 0)


class WindowForm(NamedTuple):
    """The form of the output, and how many pixels of the input's blocks lie between its positions."""

    output: Form
    stride: Pair


class WindowPlaces(NamedTuple):
    inputs: list[Place]
    output: Place
    stride: Pair  # between the pixels of the first input's place


def window_form(op: Op, window: Window, places: Places, images: int) -> WindowForm:
    """Choose the output's form: the input's own grid, unless another one needs fewer vectors."""
    source, shape = places.shapes[op.inputs[0]], places.shapes[op.output]
    stride = window.stride
    grid, rows, columns = places.best_form(op.output, images)
    if window.covers(source, shape):
        grid, rows, columns, stride = Grid(images, 1, 1), 1, 1, (source[1], source[2])
    else:
        own, own_rows, own_columns = places.form(op.inputs[0], images)
        r, c = own_rows // stride[0], own_columns // stride[1]
        fits = own_rows % stride[0] == own_columns % stride[1] == 0 and own.rows * r >= shape[1] and own.columns * c >= shape[2]
        if fits and r * c <= rows * columns:
            grid, rows, columns = own, r, c
    rows = max(rows, -(-source[1] // (grid.rows * stride[0])))
    columns = max(columns, -(-source[2] // (grid.columns * stride[1])))
    return WindowForm(Form(grid, rows, columns), stride)


def place_window(op: Op, window: Window, form: WindowForm, places: Places, images: int, padding: float | None) -> WindowPlaces:
    """Choose places for an operation with a window.

    Args:
        padding: the value of padding; None if the operation does not read it.
    """
    name, (grid, rows, columns), stride = op.inputs[0], form.output, form.stride
    source, shape = places.shapes[name], places.shapes[op.output]
    output = places.want(op.output, images, form.output)
    input_form = Form(grid, rows * stride[0], columns * stride[1])
    skips_pixels = window.kernel == (1, 1) and window.padding == (0, 0) and stride[0] == stride[1] > 1
    if skips_pixels and places.form(name, images) != input_form:  # it is copied anyway: copy only what is read
        place = places.want(name, images, form.output, NO_HALO, fill_value(window, source, shape, NO_HALO, padding), stride[0])
        stride = (1, 1)
    else:
        halo = NO_HALO if padding is None else halo_of(window, shape, form.output, input_form)
        place = places.want(name, images, input_form, halo, fill_value(window, source, shape, halo, padding))
    added = [places.want(other, images, form.output) for other in op.inputs[1:]]
    return WindowPlaces([place, *added], output, stride)


def halo_of(window: Window, shape: Shape, output: Form, source: Form) -> Halo:
    """Return how far beyond a block of the input a block of the output reads."""
    bottom = window.last_read(min(output.rows, shape[1]), 0) - (source.rows - 1)
    right = window.last_read(min(output.columns, shape[2]), 1) - (source.columns - 1)
    return Halo(*(max(0, n) for n in (window.padding[0], bottom, window.padding[1], right)))


def fill_value(window: Window, source: Shape, shape: Shape, halo: Halo, padding: float | None) -> float | None:
    """Return the value to fill padding with, or None if nothing reads it."""
    beyond = any(window.last_read(shape[1 + axis], axis) >= source[1 + axis] for axis in (0, 1))
    return padding if any(halo) or beyond else None
