"""Softmax over the channels."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from optg.deploy.engine.memory import Place
from optg.deploy.engine.ops.base import Op, Unsupported, lowers
from optg.deploy.engine.ops.copy import fill_halo
from optg.deploy.engine.step import Step
from optg.deploy.graph import Node

if TYPE_CHECKING:
    from optg.deploy.engine.lower import Lowering


@dataclass
class Softmax(Op):
    function: ClassVar[str] = "softmax"

    def steps(self, output: Place, inputs: list[Place]) -> list[Step]:
        step = self.step(output, inputs, fills_halo=False)  # threads share positions, not channels
        return [step, fill_halo(output)] if output.layout.fill is not None else [step]


@lowers("softmax", "_softmax")
def softmax(lowering: "Lowering", node: Node) -> None:
    x, dim = node.args[0], node.args[1]
    name = lowering.value(x)
    if dim % (len(lowering.forms[x.name]) + 1) != 1:
        raise Unsupported("it is not over the channels")
    lowering.emit(Softmax(node.name, [name]))
