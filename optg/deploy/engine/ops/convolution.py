"""Convolutions, linear layers and batch norms.

A linear layer is a convolution whose kernel covers its input. A batch norm scales the weights of the convolution before it;
on its own it is a convolution with one weight per channel.
"""

from ctypes import Structure, c_int64, c_void_p
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from optg.deploy.engine.build import Library
from optg.deploy.engine.layout import Grid, Layout
from optg.deploy.engine.memory import Places, Shape
from optg.deploy.engine.ops.base import Op, Pair, Placed, Unsupported, arguments, lowers, pair
from optg.deploy.engine.ops.tiles import Layer, pieces
from optg.deploy.engine.ops.window import Window, WindowPlaces, place_window, window_form
from optg.deploy.engine.step import Activation, Step
from optg.deploy.graph import Node, Ref

if TYPE_CHECKING:
    from optg.deploy.engine.lower import Lowering
    from optg.deploy.engine.tune import Tuner

FRAMED = 0.3  # density above which it is faster if channels share their loads


class ConvolutionStruct(Structure):
    _fields_ = [
        ("tiles", c_void_p), ("filters", c_void_p), ("cost", c_void_p), ("bias", c_void_p),
        ("tile_count", c_int64), ("filter_count", c_int64), ("stride_row", c_int64), ("stride_column", c_int64),
        ("filters_outside", c_int64), ("strips", c_void_p), ("strip_count", c_int64),
    ]  # fmt: skip


@dataclass
class Convolution(Op):
    """A convolution of inputs[0], plus inputs[1] if there are two."""

    weight: np.ndarray  # outputs × inputs / groups × kernel
    bias: np.ndarray
    window: Window
    groups: int = 1
    name: str = ""  # of the weight, in the model
    nonzero: int = field(init=False)

    function: ClassVar[str] = "convolution"

    def __post_init__(self) -> None:
        self.nonzero = int(np.count_nonzero(self.weight))

    @property
    def can_add(self) -> bool:
        return len(self.inputs) == 1

    def can_apply(self, activation: Activation) -> bool:
        return True

    def lay_out(self, places: Places, images: int) -> Placed:
        source, shape = places.shapes[self.inputs[0]], places.shapes[self.output]
        form = window_form(self, self.window, places, images)
        framed = self.can_be_framed(source, shape, form.output.grid, places.library)
        placed = place_window(self, self.window, form, places, images, None if framed else 0.0)
        return Placed(placed.inputs, lambda: [self.convolution_step(placed, framed)])

    def can_be_framed(self, source: Shape, output: Shape, grid: Grid, library: Library) -> bool:
        """Whether there are kernels for whole rows of this image that skip the padding. Then the input needs no halo."""
        window = self.window
        ends = [(k - 1) * d - p for k, d, p in zip(window.kernel, window.dilation, window.padding)]
        narrow = all(0 <= n <= 1 for n in (*window.padding, *ends)) and any(window.padding)
        alone = grid.rows == grid.columns == 1 and window.stride == (1, 1) and source[1:] == output[1:]
        sparse = self.nonzero < FRAMED * self.weight.size
        _, height, width = output
        known = {kernel.rows for kernel in library.kernels if kernel.framed and kernel.columns == width}
        return narrow and alone and sparse and any({b - a for a, b in pieces(0, height, rows)} <= known for rows in known)

    def convolution_step(self, placed: WindowPlaces, framed: bool) -> Step:
        (source, *added), output = placed.inputs, placed.output
        one_pixel = self.window.kernel == placed.stride == (1, 1)
        return ConvolutionStep(
            self.function, "Convolution", output.layout, output, list(placed.inputs),
            own=ConvolutionStruct(stride_row=placed.stride[0], stride_column=placed.stride[1]),
            activation=self.activation,
            op=self,
            reusable=added[0] if added and added[0] is not source else None,
            chain_key=(output.layout.grid, *output.layout.visible) if one_pixel else None,
            layouts=(source.layout, output.layout, added[0].layout if added else None),
            stride=placed.stride,
            framed=framed,
        )  # fmt: skip

    def describe(self, shape: Shape, tile: tuple[int, ...] | None) -> list[str]:
        kind = "dense" if tile is not None and tile[0] > 1 else "sparse"
        how = [f"{kind} {'×'.join(map(str, self.window.kernel))}", "add" * (len(self.inputs) > 1), self.activation.label]
        density = f"{self.nonzero / self.weight.size:.1%}"
        size = "×".join(map(str, tile[:3])) if tile else ""
        return [self.name, " + ".join(filter(None, how)), "×".join(map(str, shape)), density, size]


@dataclass(eq=False, kw_only=True)
class ConvolutionStep(Step):
    op: Convolution
    own: ConvolutionStruct
    layouts: tuple[Layout, Layout, Layout | None]  # of the input, the output, and the value to add
    stride: Pair
    framed: bool

    def tune(self, tuner: "Tuner", arena: int) -> None:
        layer = Layer(self, tuner.library)
        self.choice = tuner.choose(layer, arena)
        self.arrays += layer.arrays


# ---- lowering


@lowers("conv2d")
def conv2d(lowering: "Lowering", node: Node) -> None:
    x, weight, bias, stride, padding, dilation, groups = arguments(
        node, input=None, weight=None, bias=None, stride=1, padding=0, dilation=1, groups=1
    )
    w = lowering.tensor(weight)
    if w is None or w.ndim != 4:
        raise Unsupported("it is not two-dimensional")
    dilation, stride = pair(dilation), pair(stride)
    if isinstance(padding, str):
        extra = (dilation[0] * (w.shape[2] - 1), dilation[1] * (w.shape[3] - 1))
        padding = (0, 0) if padding == "valid" else (extra[0] // 2, extra[1] // 2)
    b = lowering.tensor(bias)
    window = Window((w.shape[2], w.shape[3]), stride, pair(padding), dilation)
    b = np.zeros(w.shape[0]) if b is None else b
    name = lowering.value(x)
    window = window.bounded(lowering.shapes[name], lowering.shapes[node.name])
    lowering.emit(Convolution(node.name, [name], w, b, window, groups, weight.name))


@lowers("convolution")
def convolution(lowering: "Lowering", node: Node) -> None:
    if node.args[6]:
        raise Unsupported("it is transposed")
    conv2d(lowering, Node(node.name, node.op, (*node.args[:6], node.args[8])))


@lowers("linear")
def linear(lowering: "Lowering", node: Node) -> None:
    x, weight, bias = arguments(node, input=None, weight=None, bias=None)
    w = lowering.tensor(weight)
    if w is None or not isinstance(x, Ref) or len(lowering.forms.get(x.name, ())) != 1:
        raise Unsupported("its input is not a batch of features")
    root = lowering.root(x.name)
    if root not in lowering.shapes:
        raise Unsupported("its input is not a batch of features")
    shape = lowering.shapes[root]
    b = lowering.tensor(bias)
    w = w.reshape(-1, *shape)
    b = np.zeros(len(w)) if b is None else b
    lowering.emit(Convolution(node.name, [root], w, b, Window(shape[1:]), 1, weight.name))


@lowers("batch_norm", "_native_batch_norm_legit_no_training")
def batch_norm(lowering: "Lowering", node: Node) -> None:
    if "no_training" in node.op:
        x, weight, bias, mean, variance, _, eps = node.args
    else:
        x, weight, bias, mean, variance, training, _, eps, _ = node.args
        if training:
            raise Unsupported("it normalises by the batch")
    name = lowering.value(x)
    m, v = lowering.tensor(mean), lowering.tensor(variance)
    if m is None or v is None:
        raise Unsupported("it normalises by the batch")
    g, b = lowering.tensor(weight), lowering.tensor(bias)
    if any(t is not None and t.ndim != 1 for t in (m, v, g, b)):
        raise Unsupported("its statistics are not one number for each channel")
    if not (v + eps > 0).all():
        raise Unsupported("its variance is not positive")
    scale = (1.0 if g is None else g) / np.sqrt(v + eps)
    shift = (0.0 if b is None else b) - m * scale
    op = lowering.open(name)
    if isinstance(op, Convolution) and len(op.inputs) == 1:
        op.weight, op.bias = op.weight * scale[:, None, None, None], op.bias * scale + shift
        lowering.extend(op, node.name)
    else:
        one_weight = scale[:, None, None, None]
        lowering.emit(Convolution(node.name, [name], one_weight, shift, Window((1, 1)), len(scale), "norm"))
