"""A step: one call of a C function, with what it reads and writes."""

from collections.abc import Hashable
from ctypes import Structure
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from optg.deploy.engine import structs
from optg.deploy.engine.build import Library
from optg.deploy.engine.layout import Layout
from optg.deploy.engine.memory import Operand, Place

if TYPE_CHECKING:
    from optg.deploy.engine.ops.base import Op
    from optg.deploy.engine.tune import Tuner

INFINITY = float("inf")
FUNCTIONS = ("plain", "hardswish", "hardsigmoid", "sigmoid", "silu", "tanh", "leaky_relu")  # numbered as in c/vectors.h
LABELS = {(-INFINITY, INFINITY): "", (0.0, INFINITY): "relu", (0.0, 6.0): "relu6"}


class Activation(NamedTuple):
    """Clamp to [low, high], then apply a function."""

    function: str = "plain"
    low: float = -INFINITY
    high: float = INFINITY
    slope: float = 0.0

    @property
    def label(self) -> str:
        return LABELS.get((self.low, self.high), "clamp") if self.function == "plain" else self.function


IDENTITY = Activation()


@dataclass(eq=False)
class Step:
    """One call of the C function `op_<function>`."""

    function: str
    label: str
    over: Layout  # the C function loops over its channels, rows and columns
    output: Operand
    inputs: list[Operand]
    own: Structure | None = None  # the operation's own struct
    arrays: list[np.ndarray] = field(default_factory=list)  # what `own` points to
    activation: Activation = IDENTITY
    fills_halo: bool = True  # does the C function fill the output's halo?
    op: "Op | None" = None
    reusable: Place | None = None  # an input whose memory the output may overwrite, if nothing else needs it later
    chain_key: Hashable = None  # consecutive steps with equal keys may run strip by strip; None: never
    chained: int = 0  # how many of the following steps run strip by strip with this one
    strip: int | None = None  # rows of a strip
    choice: tuple[int, ...] | None = None  # what the tuner chose for this step

    @property
    def places(self) -> list[Place]:
        return [operand.place for operand in (self.output, *self.inputs) if operand.place is not None]

    def bind(self, library: Library) -> None:
        """Make the C struct. All places must have their addresses."""
        views = [operand.view() for operand in self.inputs] + 2 * [structs.View()]
        self.c = structs.Step(
            run=library.function(f"op_{self.function}"),
            run_chain=library.function(f"chain_{self.function}") if self.chained else None,
            chained=self.chained,
            in_=views[0],
            add=views[1],
            out=self.output.view(),
            channels=self.over.channels,
            rows=self.over.visible[0],
            columns=self.over.visible[1],
            activation=structs.Activation(FUNCTIONS.index(self.activation.function), *self.activation[1:]),
            own=None if self.own is None else structs.address(self.own),
        )
        place = self.output.place
        if self.fills_halo and place is not None and place.layout.fill is not None:
            edges, masks = place.layout.edges
            masks = structs.vectors(masks)
            self.arrays += [edges, masks]
            self.c.halo = structs.Halo(edges.ctypes.data, len(edges), masks.ctypes.data, place.layout.fill)

    def tune(self, tuner: "Tuner", arena: int) -> None:
        """Choose how to run, where there is a choice."""
