"""A captured graph -> the operations that the engine runs, and those that are left to torch.

The rules of ops/ lower each node that they know. A norm, a sum or an activation becomes a part of the operation before it,
where that can apply it. A reshape becomes another name for the same value.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from optg.deploy.engine.int8 import rules  # noqa: F401 (fills the RULES of Int8Lowering)
from optg.deploy.engine.int8.base import Int8Op
from optg.deploy.engine.int8.lower import Int8Lowering
from optg.deploy.engine.int8.segment import Int8Segment
from optg.deploy.engine.memory import Shape
from optg.deploy.engine.ops import RULES
from optg.deploy.engine.ops.base import Op, Unsupported
from optg.deploy.engine.plan import Segment
from optg.deploy.engine.step import IDENTITY
from optg.deploy.graph import DEVICE, Graph, Node, Ref, dry_run, refs_in, resolve, run_node

CPU = torch.device("cpu")
PROBE = 8191  # a batch size that is unlikely to be another size of the model too; if it is, `Misfit` is raised at run time


class TorchCall:
    """A node that torch runs."""

    new_tensors: Sequence[str] = ()  # torch may return a view of an input
    c_files: frozenset[Path] = frozenset()

    def __init__(self, node: Node) -> None:
        self.node, self.output, self.outputs = node, node.name, [node.name]
        self.inputs = list(refs_in((node.args, node.kwargs)))

    @property
    def part(self) -> "TorchCall":
        """What starts the part of a network that runs this node: itself, because it is a part of its own."""
        return self

    def start(self, op: Any, lowering: "Lowering") -> "TorchCall":
        return self

    def take(self, op: Any, inputs: set[str]) -> bool:
        return False

    def keep_outputs(self, used: set[str]) -> None:
        """Keep the only output: it is used, or the node would not be here."""

    def run(self, value: Callable[[str], Any], batch: int, runner: Any) -> dict[str, Any]:
        """Compute the output. `value` returns the value of a name."""
        known = {name: value(name) for name in self.inputs}
        return {self.output: run_node(self.node, {**known, DEVICE: CPU})}

    def rows(self) -> list[list[str]]:
        """Return its row in the table of a compiled model; sizes have none."""
        shown = self.node.op.startswith("aten.") and ".sym_" not in self.node.op
        return [[self.output, f"torch {self.node.op}"]] if shown else []


Part = Segment | Int8Segment | TorchCall


@dataclass
class Network:
    """A model in the order in which it runs: segments for the engine, single nodes for torch."""

    parts: list[Part]
    roots: dict[str, str]  # a reshaped value -> the value whose numbers it has
    forms: dict[str, tuple[int, ...]]  # the shape of every value that begins with the batch, without the batch
    notes: list[str]

    def root(self, name: str) -> str:
        return self.roots.get(name, name)

    @property
    def c_files(self) -> list[Path]:
        """The C files of operations that are not in c/ops/."""
        return sorted({file for part in self.parts for file in part.c_files})


class Lowering:
    """What the rules read and change."""

    def __init__(self, graph: Graph) -> None:
        self.graph = replace(graph, nodes=list(map(with_positional_arguments, graph.nodes)))
        self.order: list[Op | Int8Op | TorchCall] = []
        self.made: dict[str, Op] = {}  # the engine's operations, by the value they compute
        self.notes: list[str] = []
        self.roots: dict[str, str] = {}
        self.uses = Counter(n for node in graph.nodes for n in refs_in((node.args, node.kwargs)))
        self.uses.update(refs_in(graph.outputs))
        self.meta: dict[str, Any] = dry_run(graph, PROBE)
        for name, shape, dtype in zip(graph.inputs, graph.shapes, graph.dtypes):
            sizes = tuple(PROBE if n is None else n for n in shape)
            self.meta[name] = torch.empty(sizes, dtype=dtype, device="meta")
        self.forms: dict[str, tuple[int, ...]] = {}
        self.shapes: dict[str, Shape] = {}  # of the values that the engine can hold
        batch = self.batch = PROBE if graph.dynamic else graph.shapes[0][0]
        for name, value in self.meta.items():
            if isinstance(value, (tuple, list)) and value and isinstance(value[0], Tensor):
                value = value[0]  # the engine computes only the first of several results
            if not isinstance(value, Tensor) or value.numel() == 0:
                continue
            if value.dtype == torch.float32 and value.ndim >= 1 and value.shape[0] == batch:
                self.forms[name] = tuple(value.shape[1:])
                if value.ndim in (2, 4):
                    self.shapes[name] = (*value.shape[1:], *(1, 1)[: 4 - value.ndim])
        self.int8 = Int8Lowering(self)

    def lower(self) -> Network:
        for node in self.graph.nodes:
            if not self.int8.lower(node):
                self.int8.need_floats((node.args, node.kwargs))
                self.lower_float(node)
        self.int8.need_floats(self.graph.outputs)
        return Network(self.parts(), self.roots, self.forms, self.notes)

    def lower_float(self, node: Node) -> None:
        """Turn a node into an operation on floats, or leave it to torch."""
        packet = node.op.split(".")[1]
        try:
            if packet not in RULES or node.name not in self.forms:
                raise Unsupported
            if has_nan((node.args, node.kwargs)):
                raise Unsupported("an argument is NaN")  # the engine's comparisons would ignore it; torch returns NaN
            RULES[packet](self, node)
        except Unsupported as reason:
            self.order.append(TorchCall(node))
            if node.op.startswith("aten.") and not packet.startswith("sym_"):
                detail = f": {reason}" if str(reason) else ""
                self.notes.append(f"{node.name} ({node.op}) runs in torch{detail}")

    def parts(self) -> list[Part]:
        """Drop operations that nothing needs, and group those of the engine into segments."""
        parts: list[Part] = []
        for op in self.needed(self.order):
            if not parts or not parts[-1].take(op, set(map(self.root, op.inputs))):
                parts.append(op.part.start(op, self))
        used = {self.root(name) for name in refs_in(self.graph.outputs)}
        for part in reversed(parts):
            part.keep_outputs(used)
            used.update(map(self.root, part.inputs))
        return parts

    def needed(self, order: Sequence[Op | Int8Op | TorchCall]) -> list[Op | Int8Op | TorchCall]:
        """Return the operations that the outputs depend on."""
        used = {self.root(name) for name in refs_in(self.graph.outputs)}
        kept: list[Op | Int8Op | TorchCall] = []
        for op in reversed(order):
            if op.output in used:
                used.update(map(self.root, op.inputs))
                kept.append(op)
        return kept[::-1]

    # ---- what the rules use

    def root(self, name: str) -> str:
        """Return the value whose numbers a value has: itself, or the one that it was reshaped from."""
        return self.roots.get(name, name)

    def value(self, argument: Any) -> str:
        """Return the engine's value that an argument names."""
        if not isinstance(argument, Ref) or self.root(argument.name) not in self.shapes:
            raise Unsupported("its input is not a batch of images or features in float32")
        root = self.root(argument.name)
        if self.shapes.get(argument.name) != self.shapes[root]:
            raise Unsupported("its input was reshaped")
        return root

    def tensor(self, argument: Any) -> np.ndarray | None:
        """Return a weight, which must be stored in the model."""
        if argument is None:
            return None
        if not isinstance(argument, Ref) or argument.name not in self.graph.tensors:
            raise Unsupported("its weight is computed")
        weight = self.graph.tensors[argument.name].detach().to(torch.float64).numpy()
        if not np.isfinite(weight).all():
            raise Unsupported("its weight holds NaN or infinite numbers")
        return weight

    def require_unused_indices(self, node: Node) -> None:
        """Refuse a maximum whose second result, the indices, is used."""
        if isinstance(self.meta[node.name], (tuple, list)):
            if node.name in refs_in(self.graph.outputs):
                raise Unsupported("its indices are returned")
            for user in self.graph.nodes:
                if Ref(node.name) in user.args and user.args != (Ref(node.name), 0):
                    raise Unsupported("its indices are used")

    def refuse_broadcast(self, node: Node, x: str, y: str) -> None:
        """Refuse to combine values of different shapes. B×C×1×1 and B×C have the same shape here, but not in torch."""
        if not self.shapes[x] == self.shapes[y] == self.shapes.get(node.name):
            raise Unsupported("it broadcasts")

    def emit(self, op: Op) -> None:
        """Add an operation at the end."""
        if op.output not in self.shapes:
            raise Unsupported
        self.order.append(op)
        self.made[op.output] = op

    def rename(self, node: Node, source: str) -> None:
        """Make a node's value another name for an earlier one."""
        self.roots[node.name] = self.root(source)
        self.uses[self.root(source)] += self.uses[node.name] - 1

    def extend(self, op: Op, output: str) -> None:
        """Let an operation compute a later value instead of its own; it moves to the end."""
        del self.made[op.output]
        self.order.remove(op)
        op.output = output
        self.emit(op)

    def open(self, name: str) -> Op | None:
        """Return the operation that computes a value, if it can absorb the next one: nothing else uses the value."""
        op = self.made.get(name)
        return op if op is not None and self.uses[name] == 1 and op.activation == IDENTITY else None


def has_nan(arguments: Any) -> bool:
    """Return whether there is a NaN among a node's arguments."""
    if isinstance(arguments, dict):
        arguments = tuple(arguments.values())
    return any(map(has_nan, arguments)) if isinstance(arguments, (list, tuple)) else arguments != arguments


def with_positional_arguments(node: Node) -> Node:
    """Return the node with its arguments in the order of the signature: a file may name any of them."""
    if not node.kwargs or not node.op.startswith(("aten.", "optg.")):
        return node
    signature = [parameter for parameter in resolve(node.op)._schema.arguments if not parameter.kwarg_only]  # type: ignore[attr-defined]
    given = {**{parameter.name: value for parameter, value in zip(signature, node.args)}, **node.kwargs}
    last = max((i for i, parameter in enumerate(signature) if parameter.name in given), default=-1)
    args = tuple(given.pop(parameter.name, parameter.default_value) for parameter in signature[: last + 1])
    return Node(node.name, node.op, args, given)


def lower(graph: Graph) -> Network:
    return Lowering(graph).lower()
