"""A network as the engine sees it: few kinds of operation, on values of channels × height × width per image."""

from dataclasses import dataclass, field
from typing import Literal

import numpy as np

Shape = tuple[int, int, int]
Pair = tuple[int, int]

INFINITY = float("inf")
ACTIVATIONS = ("plain", "hardswish", "hardsigmoid", "sigmoid", "silu", "tanh", "leaky_relu")  # as numbered in engine.c


@dataclass(frozen=True)
class Activation:
    """min(high, max(low, x)), then the function of that name."""

    name: str = "plain"
    low: float = -INFINITY
    high: float = INFINITY
    slope: float = 0.0

    @property
    def nothing(self) -> bool:
        return self == Activation()

    @property
    def label(self) -> str:
        if self.name != "plain":
            return self.name
        return {(-INFINITY, INFINITY): "", (0.0, INFINITY): "relu", (0.0, 6.0): "relu6"}.get((self.low, self.high), "clamp")


@dataclass
class Op:
    """One operation; `output` is the name of the value it makes."""

    output: str
    inputs: list[str]
    activation: Activation = field(default=Activation(), kw_only=True)


@dataclass
class Window:
    """What a convolution or a pooling sees of its input."""

    kernel: Pair
    stride: Pair = (1, 1)
    padding: Pair = (0, 0)  # at the top and left; further ones follow from the output's size
    dilation: Pair = (1, 1)

    def reach(self, output_rows: int, input_rows: int, axis: int) -> Pair:
        """How far beyond a block of the input a block of the output sees: before and after."""
        last = (output_rows - 1) * self.stride[axis] - self.padding[axis] + (self.kernel[axis] - 1) * self.dilation[axis]
        return max(0, self.padding[axis]), max(0, last - (input_rows - 1))


@dataclass
class Conv(Op):
    """A convolution of inputs[0], plus inputs[1] where there is one. A linear layer is one whose kernel covers its input."""

    weight: np.ndarray  # outputs × inputs / groups × kernel
    bias: np.ndarray
    window: Window
    groups: int = 1
    name: str = ""  # of the weight, in the model
    nonzero: int = field(init=False)

    def __post_init__(self) -> None:
        self.nonzero = int(np.count_nonzero(self.weight))


@dataclass
class Pool(Op):
    kind: Literal["max", "mean"]
    window: Window
    count_padding: bool = True  # is padding a part of the mean?
    divisor: int = 0  # of the mean, in place of the number of pixels


@dataclass
class Mean(Op):
    """The mean over height and width."""


@dataclass
class Pointwise(Op):
    """inputs[0] + scale · inputs[1], or their product; with one input only the activation."""

    kind: Literal["add", "mul"] = "add"
    scale: float = 1.0


@dataclass
class Softmax(Op):
    """Over the channels."""


@dataclass
class Concat(Op):
    """The inputs' channels, one after the other."""
