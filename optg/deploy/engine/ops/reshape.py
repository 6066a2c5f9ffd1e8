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
    if node.op == "aten.squeeze.default":
        raise Unsupported("it also removes the batch dimension of a single image")
    if not isinstance(source, Ref) or lowering.root(source.name) not in lowering.shapes:
        raise Unsupported
    if prod(lowering.forms[source.name]) != prod(lowering.forms[node.name]):
        raise Unsupported
    lowering.rename(node, source.name)


@lowers("getitem")
def getitem(lowering: "Lowering", node: Node) -> None:
    source, index = node.args
    if index != 0 or source.name not in lowering.made:
        raise Unsupported
    lowering.rename(node, source.name)
