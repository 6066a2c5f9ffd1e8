"""The parts of a graph: nodes that name an operation, references to values, and the tensors."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

if TYPE_CHECKING:
    from optg.deploy.graph.limits import Limits

TensorKind = Literal["parameter", "buffer", "constant"]  # constants are not part of the state_dict
TENSOR_KINDS: tuple[TensorKind, ...] = ("parameter", "buffer", "constant")


class GraphError(ValueError):
    """The model cannot be captured, or the graph cannot be run."""


def require(condition: bool, problem: str) -> None:
    """Raise GraphError unless the condition holds."""
    if not condition:
        raise GraphError(problem)


def shorten(value: Any) -> str:
    """Return a value of a file for an error message."""
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:99]}…"


@dataclass(frozen=True)
class Ref:
    """A reference to a value by name: an input, a tensor, or the result of an earlier node."""

    name: str


@dataclass(frozen=True)
class Node:
    """One operation. Arguments are plain values, dtypes, memory formats and Refs, or lists, tuples and dicts of these."""

    name: str
    op: str  # such as aten.conv2d.default, or operator.getitem and operator.mul for results with several parts and for sizes
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)


@dataclass
class Graph:
    """A model as data: inputs, nodes in execution order, outputs and tensors."""

    inputs: list[str]
    shapes: list[tuple[int | None, ...]]  # one per input; None marks the batch dimension, which may have any size
    dtypes: list[torch.dtype]  # one per input
    nodes: list[Node]  # in execution order, without dead nodes
    outputs: Any  # a Ref, or tuples, lists and dicts of Refs and plain values
    tensors: dict[str, Tensor]  # on the CPU; a shared tensor appears once, under its first name in the state_dict
    kinds: dict[str, TensorKind]  # one per tensor
    aliases: dict[str, str] = field(default_factory=dict)  # other state_dict names of shared tensors -> first name
    limits: "Limits | None" = None  # on the memory and the work of a call; None: the graph does not come from a file

    @property
    def dynamic(self) -> bool:
        """Return whether the graph accepts batches of any size."""
        return any(None in shape for shape in self.shapes)


def refs_in(value: Any) -> Iterator[str]:
    """Yield the names that an argument refers to."""
    if isinstance(value, Ref):
        yield value.name
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from refs_in(item)
    elif isinstance(value, dict):
        yield from refs_in(list(value.values()))


def check_outputs(value: Any) -> None:
    """Raise GraphError unless the outputs are Refs and plain values in lists, tuples and dicts."""
    if type(value) in (list, tuple):
        for item in value:
            check_outputs(item)
    elif type(value) is dict and all(isinstance(key, str) for key in value):
        for item in value.values():
            check_outputs(item)
    elif not isinstance(value, (Ref, int, float, str, bool, type(None))):
        raise GraphError(f"the model returns a {type(value).__name__}; expected tensors, or tuples, lists or dicts of tensors")
