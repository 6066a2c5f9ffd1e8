"""Maximum and mean over a window: max_pool2d, avg_pool2d, adaptive pooling."""

from ctypes import Structure, c_int64, c_void_p
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np

from optg.deploy.engine.layout import Layout
from optg.deploy.engine.memory import Part, Places, Shape
from optg.deploy.engine.ops.base import Op, Placed, Unsupported, arguments, lowers, pair
from optg.deploy.engine.ops.mean import Mean
from optg.deploy.engine.ops.window import Window, WindowPlaces, place_window, window_form
from optg.deploy.engine.step import INFINITY, Activation, Step
from optg.deploy.engine.structs import vectors
from optg.deploy.graph import Node

if TYPE_CHECKING:
    from optg.deploy.engine.lower import Lowering


class PoolStruct(Structure):
    _fields_ = [
        *((f"{name}_{axis}", c_int64) for name in ("window", "dilation", "stride") for axis in ("row", "column")),
        ("weights", c_void_p),
    ]


@dataclass
class Pool(Op):
    kind: Literal["max", "mean"]
    window: Window
    count_padding: bool = True  # does padding count as pixels of the mean?
    divisor: int = 0  # of the mean, instead of the number of pixels

    cut_after: ClassVar[bool] = True  # its output is smaller than its input

    def can_apply(self, activation: Activation) -> bool:
        return activation.function == "plain"

    def lay_out(self, places: Places, images: int) -> Placed:
        padding = -INFINITY if self.kind == "max" else 0.0
        form = window_form(self, self.window, places, images)
        placed = place_window(self, self.window, form, places, images, padding)
        source, shape = places.shapes[self.inputs[0]], places.shapes[self.output]
        return Placed(placed.inputs, lambda: [self.window_step(placed, source, shape)])

    def window_step(self, placed: WindowPlaces, source: Shape, shape: Shape) -> Step:
        [place], output = placed.inputs, placed.output
        own = PoolStruct(*self.window.kernel, *self.window.dilation, *placed.stride)
        arrays = []
        if self.kind == "mean":
            arrays = [vectors(self.weights(output.layout, source, shape))]
            own.weights = arrays[0].ctypes.data
        corner = -self.window.padding[0] * place.layout.row - self.window.padding[1] * place.layout.vector
        return Step(
            f"pool_{self.kind}", "Pool", output.layout, output, [Part(place, corner)], own, arrays, self.activation, op=self
        )

    def weights(self, layout: Layout, source: Shape, shape: Shape) -> np.ndarray:
        """Return 1 / the number of pixels in the window of each position and lane."""
        counts = self.counts(source, shape)
        weights = np.zeros(layout.pixels.shape, np.float32)
        inside = layout.pixels >= 0
        weights[inside] = 1 / counts.ravel()[layout.pixels[inside] % counts.size]
        rows, columns = layout.visible
        return weights[:rows, :columns]

    def counts(self, source: Shape, shape: Shape) -> np.ndarray:
        """Return the pixels in each window as torch counts them: with the padding, but not with what lies beyond it."""
        axes = []
        for axis in (0, 1):
            first = np.arange(shape[1 + axis]) * self.window.stride[axis] - self.window.padding[axis]
            last = np.minimum(first + self.window.kernel[axis], source[1 + axis] + self.window.padding[axis])
            if not self.count_padding:
                first, last = np.maximum(first, 0), np.minimum(last, source[1 + axis])
            axes.append(last - first)
        return np.full((len(axes[0]), len(axes[1])), self.divisor) if self.divisor else np.outer(*axes)


@lowers("max_pool2d", "max_pool2d_with_indices")
def max_pool2d(lowering: "Lowering", node: Node) -> None:
    x, kernel, stride, padding, dilation, _ = arguments(
        node, input=None, kernel_size=None, stride=(), padding=0, dilation=1, ceil_mode=False
    )
    lowering.require_unused_indices(node)
    window = Window(pair(kernel), pair(stride or kernel), pair(padding), pair(dilation))
    name = lowering.value(x)
    lowering.emit(Pool(node.name, [name], "max", window.bounded(lowering.shapes[name], lowering.shapes[node.name])))


@lowers("avg_pool2d")
def avg_pool2d(lowering: "Lowering", node: Node) -> None:
    x, kernel, stride, padding, _, count_padding, divisor = arguments(
        node, input=None, kernel_size=None, stride=(), padding=0, ceil_mode=False, count_include_pad=True, divisor_override=None
    )
    window = Window(pair(kernel), pair(stride or kernel), pair(padding))
    name = lowering.value(x)
    window = window.bounded(lowering.shapes[name], lowering.shapes[node.name])
    lowering.emit(Pool(node.name, [name], "mean", window, bool(count_padding), divisor or 0))


@lowers("adaptive_avg_pool2d", "_adaptive_avg_pool2d")
def adaptive_avg_pool2d(lowering: "Lowering", node: Node) -> None:
    name = lowering.value(node.args[0])
    if lowering.shapes[node.name][1:] == (1, 1):
        lowering.emit(Mean(node.name, [name]))
    else:
        lowering.emit(Pool(node.name, [name], "mean", adaptive_window(lowering, node, name)))


@lowers("adaptive_max_pool2d")
def adaptive_max_pool2d(lowering: "Lowering", node: Node) -> None:
    name = lowering.value(node.args[0])
    lowering.require_unused_indices(node)
    lowering.emit(Pool(node.name, [name], "max", adaptive_window(lowering, node, name)))


def adaptive_window(lowering: "Lowering", node: Node, name: str) -> Window:
    _, height, width = lowering.shapes[name]
    _, rows, columns = lowering.shapes[node.name]
    if height % rows or width % columns:
        raise Unsupported("its windows differ in size")
    size = (height // rows, width // columns)
    return Window(size, size)
