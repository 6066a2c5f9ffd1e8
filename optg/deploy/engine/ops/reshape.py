"""Reshapes, which keep the order of numbers: only another name for the same value."""

from math import prod
from typing import TYPE_CHECKING

from optg.deploy.engine.ops.base import Unsupported, lowers
from optg.deploy.graph import Node, Ref

if TYPE_CHECKING:
    from optg.deploy.engine.lower import Lowering


@lowers("flatten", "view", "reshape", "_unsafe_view", "squeeze", "unsqueeze", "contiguous", "clone")
def reshape(lowering: "Lowering", node: Node) -> None:
    source = node.args[0]
    if not isinstance(source, Ref) or lowering.root(source.name) not in lowering.shapes:
        raise Unsupported
    if "squeeze." in node.op and removes_batch(lowering, node):
        raise Unsupported("it also removes the batch dimension of a single image")
    if prod(lowering.forms[source.name]) != prod(lowering.forms[node.name]):
        raise Unsupported
    lowering.rename(node, source.name)


def removes_batch(lowering: "Lowering", node: Node) -> bool:
    """Whether a squeeze removes the batch dimension of a single image."""
    if node.op.startswith("aten.unsqueeze") or len(node.args) < 2:
        return node.op == "aten.squeeze.default"
    rank = len(lowering.forms[node.args[0].name]) + 1
    dims = [node.args[1]] if isinstance(node.args[1], int) else node.args[1]
    return any(dim % rank == 0 for dim in dims)


@lowers("getitem")
def getitem(lowering: "Lowering", node: Node) -> None:
    source, index = node.args
    if index != 0 or source.name not in lowering.made:
        raise Unsupported
    lowering.rename(node, source.name)
