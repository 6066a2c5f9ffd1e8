"""What every operation of the engine is made of, and the registry of the torch operations that they lower.

An operation is one file in this folder and one C function in c/ops/. The file holds
- a subclass of `Op`, which lays out its inputs and its output in memory and makes the steps that C runs;
- a rule for each torch operation that it implements, registered with `@lowers`.
"""

from collections.abc import Callable
from ctypes import Structure
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from optg.deploy.engine.memory import Place, Places, Shape
from optg.deploy.engine.step import IDENTITY, Activation, Step
from optg.deploy.graph import Node

if TYPE_CHECKING:
    from optg.deploy.engine.lower import Lowering

Pair = tuple[int, int]


class Unsupported(Exception):
    """The engine does not have this operation, or not this form of it: torch runs it."""


Rule = Callable[["Lowering", Node], None]
RULES: dict[str, Rule] = {}  # by the torch operation's name: "conv2d" for aten.conv2d.default


def lowers(*names: str) -> Callable[[Rule], Rule]:
    """Register a rule that turns nodes of these torch operations into operations of the engine, or raises Unsupported."""

    def register(rule: Rule) -> Rule:
        RULES.update(dict.fromkeys(names, rule))
        return rule

    return register


class Placed(NamedTuple):
    """An operation after its places are chosen."""

    inputs: list[Place]  # must hold their values before the steps run
    make_steps: Callable[[], list[Step]]  # call it once all layouts are final


@dataclass
class Op:
    """One operation. By default it works position by position on inputs of one shape, like an activation."""

    output: str  # the name of the value that it computes
    inputs: list[str]
    activation: Activation = field(default=IDENTITY, kw_only=True)

    function: ClassVar[str] = ""  # the name of its C function, without op_
    source: ClassVar[Path | None] = None  # the C file, if it is not in c/ops/
    part: ClassVar[Any]  # the class of the parts of a network that it runs in; `plan` sets it
    cut_after: ClassVar[bool] = False  # images are put side by side after this operation, not before it
    nonzero: int = field(default=0, init=False)  # multiply-adds per position

    # ---- lowering: what the operation can absorb

    @property
    def can_add(self) -> bool:
        """Whether it can add another value of its output's shape to its result."""
        return False

    def can_apply(self, activation: Activation) -> bool:
        """Whether it can apply this activation to its result."""
        return False

    # ---- planning

    def lay_out(self, places: Places, images: int) -> Placed:
        """Choose places for the inputs and the output of a group of images."""
        form = places.form(self.inputs[0], images)
        inputs = [places.want(name, images, form) for name in self.inputs]
        output = places.want(self.output, images, form)
        return Placed(inputs, lambda: self.steps(output, inputs))

    def steps(self, output: Place, inputs: list[Place]) -> list[Step]:
        """Make the steps of the default layout. All layouts are final, addresses are not."""
        return [self.step(output, inputs)]

    def step(self, output: Place, inputs: list[Place], **more: Any) -> Step:
        """Make a step that runs this operation's C function on these places."""
        options = {"over": output.layout, "own": self.parameters(), "activation": self.activation, "op": self, **more}
        return Step(self.function, type(self).__name__, output=output, inputs=list(inputs), **options)

    def parameters(self) -> Structure | None:
        """Return the operation's own C struct, if it has one."""
        return None

    # ---- the table of a compiled model

    def describe(self, shape: Shape, tile: tuple[int, ...] | None) -> list[str]:
        """Return the row: layer, how it runs, output shape, density, tile."""
        how = [type(self).__name__.lower(), self.activation.label]
        return [self.output, " + ".join(filter(None, how)), "×".join(map(str, shape)), "", ""]


def arguments(node: Node, **defaults: Any) -> list[Any]:
    """Return a node's arguments by name, in the order of `defaults`."""
    values = {**defaults, **dict(zip(defaults, node.args)), **node.kwargs}
    return [values[name] for name in defaults]


def pair(value: Any) -> Pair:
    """Return a size for height and width from an int or a list of one or two."""
    sizes = (value,) if isinstance(value, int) else tuple(value)
    return sizes[0], sizes[-1]
