"""Limits on what a packed file may ask for: nodes, names, memory and work. They are checked before memory is allocated."""

import os
from dataclasses import dataclass, field
from math import ceil, prod
from typing import Any

from optg.deploy.graph.costs import bytes_of, cost_of
from optg.deploy.graph.domains import check_arguments
from optg.deploy.graph.interpret import dry_run, freed_after
from optg.deploy.graph.nodes import Graph, GraphError, Node

NODES = 10_000
NAMES = 10_000  # tensors and their aliases; also the modules in their names
MEMORY = 2**31  # bytes of all values that exist at the same time, for one image
WORK = 5 * 10**11  # multiply-adds for one image, or what takes as long (costs.py)
WORK_OF_SMALL_FILES, WORK_PER_BYTE = 4 * 10**9, 2**19
IMAGE = 2**28  # bytes of one image
VARIABLE = "OPTG_LIMITS"


class LimitExceeded(GraphError):
    """The file asks for more than the limits allow."""


@dataclass(frozen=True)
class Limits:
    """All limits, multiplied by a factor."""

    factor: float = 1.0
    work: int = WORK
    checked: set[int] = field(default_factory=set)  # batch sizes that are within the limits

    def for_file(self, size: int) -> "Limits":
        """Return the limits for a file of this many bytes: a small file may ask for less work."""
        return Limits(self.factor, min(WORK, max(WORK_OF_SMALL_FILES, WORK_PER_BYTE * size)))

    @classmethod
    def of(cls, factor: float | None) -> "Limits":
        """Return the limits times this factor; by default times $OPTG_LIMITS, or 1."""
        text = os.environ.get(VARIABLE, "1")
        try:
            factor = float(text) if factor is None else float(factor)
        except ValueError:
            factor = 0.0
        if not 0 < factor < float("inf"):
            raise ValueError(f"the factor for the limits is {factor or text!r}; expected a number above 0")
        return cls(factor)

    def require(self, value: int, limit: int, what: str) -> None:
        """Raise LimitExceeded if the value is too large. `what` is the message, with … in place of the value."""
        if value > limit * self.factor:
            needed = ceil(value / limit)
            raise LimitExceeded(
                f"{what.replace('…', f'{value:,}')}; the limit is {round(limit * self.factor):,}. "
                f"If you trust the file, raise the limits: optg.load(…, limits={needed}), or {VARIABLE}={needed}"
            )

    def check_batch(self, graph: Graph, batch: int) -> None:
        """Raise GraphError if a batch of this size needs more than that many images may, or if an argument is out of range."""
        if batch in self.checked:
            return
        Meter(self, graph, batch).run()
        if len(self.checked) < NODES:
            self.checked.add(batch)


class Meter:
    """Dry-runs a graph, and adds up the work and the memory of its values."""

    def __init__(self, limits: Limits, graph: Graph, batch: int) -> None:
        self.limits, self.graph, self.batch = limits, graph, batch
        self.images = max(1, batch) if graph.dynamic else 1
        self.call = f"a forward pass of {self.images} image{'s' * (self.images > 1)}"
        self.freed = freed_after(graph)
        self.sizes: dict[str, int] = {}
        self.live = self.work = 0

    def run(self) -> None:
        for name, shape, dtype in zip(self.graph.inputs, self.graph.shapes, self.graph.dtypes):
            sizes = [self.batch if n is None else n for n in shape]
            size = prod(max(1, n) for n in sizes) * dtype.itemsize  # strides of an empty tensor may overflow too
            self.limits.require(size, IMAGE * self.images, f"{self.call} takes … bytes for the input {name}")
            self.live += size
        dry_run(self.graph, self.batch, check=self.check, on_value=self.add)

    def check(self, op: str, args: Any, named: dict[str, Any]) -> None:
        self.given = check_arguments(op, args, named)

    def add(self, node: Node, value: Any) -> None:
        """Count a node's result. It is a meta tensor, which takes no memory."""
        self.sizes[node.name] = bytes_of(value)
        cost = cost_of(node.op, self.given, value)
        self.work += cost.work
        self.live += self.sizes[node.name]
        call = f"{self.call}, up to node {node.name} ({node.op}),"
        self.limits.require(self.live + cost.temporary, MEMORY * self.images, f"{call} needs … bytes at the same time")
        self.limits.require(self.work, self.limits.work * self.images, f"{call} takes … multiply-adds")
        self.live -= sum(self.sizes.pop(name, 0) for name in self.freed.get(node.name, ()))
