"""Concatenation along the channels: one copy per input, into its part of the output."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from optg.deploy.engine.memory import Part, Place
from optg.deploy.engine.ops.base import Op, Unsupported, arguments, lowers
from optg.deploy.engine.ops.pointwise import Pointwise, PointwiseStruct
from optg.deploy.engine.step import Step
from optg.deploy.graph import Node

if TYPE_CHECKING:
    from optg.deploy.engine.lower import Lowering


@dataclass
class Concat(Op):
    def steps(self, output: Place, inputs: list[Place]) -> list[Step]:
        steps, channel = [], 0
        for place in inputs:
            part = Part(output, channel * output.layout.channel)
            steps.append(Step(Pointwise.function, "Concat", place.layout, part, [place], PointwiseStruct(), op=self))
            channel += place.layout.channels
        return steps


@lowers("cat")
def cat(lowering: "Lowering", node: Node) -> None:
    parts, dim = arguments(node, tensors=(), dim=0)
    if not isinstance(parts, (list, tuple)):
        raise Unsupported("its inputs are the parts of one tensor")
    names = [lowering.value(part) for part in parts]
    if dim % (len(lowering.forms[node.name]) + 1) != 1:
        raise Unsupported("it is not along the channels")
    lowering.emit(Concat(node.name, names))
