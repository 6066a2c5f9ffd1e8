"""What every operation on bytes is made of."""

from collections.abc import Callable, Sequence
from ctypes import Structure
from dataclasses import dataclass, field
from math import isfinite
from typing import Any, ClassVar, NamedTuple

import numpy as np

from optg.deploy.engine import structs
from optg.deploy.engine.build import Library
from optg.deploy.engine.int8.planes import Part, Planes
from optg.deploy.engine.memory import Shape
from optg.deploy.engine.ops.base import Unsupported
from optg.deploy.engine.structs import View
from optg.deploy.engine.tune import Tuner
from optg.deploy.graph import Node

INFINITY = float("inf")
LARGEST_SUM = 2**31 - 1


class Quantization(NamedTuple):
    """How bytes stand for reals: scale · (byte − zero_point)."""

    scale: float
    zero_point: int

    @classmethod
    def checked(cls, scale: float, zero_point: int) -> "Quantization":
        if not (isfinite(scale) and scale > 0):
            raise Unsupported(f"its scale is {scale}; expected a positive number")
        if not 0 <= zero_point <= 255:
            raise Unsupported(f"its zero point is {zero_point}; expected 0 to 255")
        return cls(float(scale), int(zero_point))

    def byte(self, real: float) -> int:
        """Return the byte that is nearest to a real: the bound of a clamp. Infinities become 0 and 255."""
        return int(min(max(np.rint(real / self.scale) + self.zero_point, 0), 255))


REAL = Quantization(1.0, 0)  # of a result that is not quantized


@dataclass(eq=False)
class CallerTensor:
    """A torch tensor of the caller's: images × channels × height × width."""

    buffer: int
    shape: Shape
    images: int
    number: int  # bytes of a number
    planes: None = field(default=None, init=False)

    def view(self) -> View:
        channels, height, width = self.shape
        return View(self.buffer, 0, 0, 0, 0, self.number * channels * height * width * self.images)


@dataclass(eq=False)
class Call:
    """One call of the C function `op_<function>`."""

    function: str
    output: Planes | Part | CallerTensor
    inputs: Sequence[Planes | CallerTensor]
    channels: int
    make_struct: Callable[[], tuple[Structure, list[np.ndarray]]]  # with what it points to; call it when addresses are known
    op: "Int8Op | None" = None
    in_place: Planes | None = None  # an input whose memory the output may take
    choice: tuple[int, ...] | None = None  # what the tuner chose

    @property
    def values(self) -> list[Planes]:
        """The values in the arena that it touches."""
        return [value.planes for value in (self.output, *self.inputs) if value.planes is not None]

    def bind(self, library: Library) -> None:
        """Make the C struct. All values must have their addresses."""
        self.own, self.arrays = self.make_struct()
        views = [value.view() for value in self.inputs] + 2 * [View()]
        self.c = structs.Step(
            run=library.function(f"op_{self.function}"),
            in_=views[0],
            add=views[1],
            out=self.output.view(),
            channels=self.channels,
            own=structs.address(self.own),
        )

    def tune(self, tuner: Tuner, arena: int) -> None:
        """Choose how to run, where there is a choice."""


class Places:
    """The values of a program in the arena, by name and by what is special about the copy."""

    def __init__(self, shapes: dict[str, Shape], images: int, library: Library, tensors: dict[str, CallerTensor]) -> None:
        self.shapes, self.images, self.library = shapes, images, library
        self.tensors = tensors  # the caller's, by the name of the value
        self.known: dict[tuple[str, ...], Planes] = {}
        self.on_pixels: set[str] = set()  # outputs of the operations that run on pixels
        self.needs_planes: set[str] = set()  # values that others read

    def choose_layouts(self, ops: Sequence["Int8Op"], outputs: Sequence[str]) -> None:
        """Decide which operations run on pixels, and which values must be there as planes."""
        self.on_pixels = {op.output for op in ops if op.prefers_pixels(self)}
        others = [op.inputs for op in ops if op.output not in self.on_pixels]
        self.needs_planes = {*outputs, *(name for inputs in others for name in inputs)}

    def value(self, name: str, zero_point: int, number: int = 1) -> Planes:
        """Return the planes of a value."""
        if (name,) not in self.known:
            self.known[name,] = Planes(self.shapes[name], self.images, zero_point, number)
        return self.known[name,]

    def copy(self, name: str, kind: str, shape: Shape, zero_point: int, number: int = 1) -> tuple[Planes, bool]:
        """Return a copy of a value in another layout, and whether it is new."""
        new = (name, kind) not in self.known
        if new:
            self.known[name, kind] = Planes(shape, self.images, zero_point, number)
        return self.known[name, kind], new


@dataclass
class Int8Op:
    """One operation. It is open until the quantization of its result is known: a sum or a clamp may join it."""

    output: str  # the name of the value that it computes
    inputs: list[str]
    quantized: list[Quantization]  # of the inputs
    low: float = field(default=-INFINITY, kw_only=True)  # clamp the real result
    high: float = field(default=INFINITY, kw_only=True)
    result: Quantization | None = field(default=None, kw_only=True)  # None: the result is written as floats
    nodes: list[Node] = field(default_factory=list, kw_only=True)  # that it stands for

    can_be_real: ClassVar[bool] = False  # can it write floats?
    can_clamp: ClassVar[bool] = True
    reads_tensors: ClassVar[bool] = False  # of torch, which exist before its part runs
    part: ClassVar[Any]  # the class of the parts of a network that it runs in; `segment` sets it
    nonzero: int = field(default=0, init=False)  # multiply-adds per position

    @property
    def can_add(self) -> bool:
        """Whether it can add another value to its result."""
        return False

    def close(self, output: str, result: Quantization | None) -> None:
        """Set the name and the quantization of the result. Raise Unsupported if it cannot be computed exactly."""
        self.output, self.result = output, result

    @property
    def out(self) -> Quantization:
        return self.result or REAL

    @property
    def bounds(self) -> tuple[int, int]:
        """The bytes between which the result is clamped."""
        return self.out.byte(self.low), self.out.byte(self.high)

    def prefers_pixels(self, places: Places) -> bool:
        """Return whether its input and output should lie pixel by pixel, not in planes."""
        return False

    def lay_out(self, places: Places) -> Callable[[], list[Call]]:
        """Choose the places of inputs and output. Return a function that makes the calls once all layouts are final."""
        raise NotImplementedError

    @property
    def clamp_label(self) -> str:
        if (self.low, self.high) == (-INFINITY, INFINITY):
            return ""
        return "relu" if (self.low, self.high) == (0.0, INFINITY) else "clamp"

    def describe(self, shape: Shape, choice: tuple[int, ...] | None) -> list[str]:
        """Return the row: layer, how it runs, output shape, density, tile."""
        how = [f"int8 {type(self).__name__.lower()}", self.clamp_label]
        return [self.output, " + ".join(filter(None, how)), "×".join(map(str, shape)), "", ""]
