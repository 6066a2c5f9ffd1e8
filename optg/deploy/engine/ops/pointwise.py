"""Sums, products and activations, position by position."""

from collections.abc import Callable
from ctypes import Structure, c_float, c_int64
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from optg.deploy.engine.ops.base import Op, Unsupported, arguments, lowers
from optg.deploy.engine.step import INFINITY, Activation
from optg.deploy.graph import Node

if TYPE_CHECKING:
    from optg.deploy.engine.lower import Lowering


class PointwiseStruct(Structure):
    _fields_ = [("multiply", c_int64), ("scale", c_float)]


@dataclass
class Pointwise(Op):
    """inputs[0] + scale · inputs[1], or their product; with one input only the activation."""

    kind: Literal["add", "mul"] = "add"
    scale: float = 1.0

    function: ClassVar[str] = "pointwise"

    def can_apply(self, activation: Activation) -> bool:
        return True

    def parameters(self) -> Structure:
        return PointwiseStruct(self.kind == "mul", self.scale)


@lowers("add")
def add(lowering: "Lowering", node: Node) -> None:
    a, b, alpha = arguments(node, input=None, other=None, alpha=1)
    x, y = lowering.value(a), lowering.value(b)
    lowering.refuse_broadcast(node, x, y)
    if not isinstance(alpha, (int, float)):
        raise Unsupported("its factor is computed")
    absorbing = [op for op in map(lowering.open, (x, y)) if op is not None and op.can_add]
    if absorbing and alpha == 1 and x != y:
        op = max(absorbing, key=lowering.order.index)
        op.inputs.append(y if op.output == x else x)
        lowering.extend(op, node.name)
    else:
        lowering.emit(Pointwise(node.name, [x, y], "add", float(alpha)))


@lowers("mul")
def mul(lowering: "Lowering", node: Node) -> None:
    x, y = lowering.value(node.args[0]), lowering.value(node.args[1])
    lowering.refuse_broadcast(node, x, y)
    lowering.emit(Pointwise(node.name, [x, y], "mul"))


def activation(*names: str) -> Callable[[Callable[[Node], Activation]], None]:
    """Register the activation of these torch operations. The operation before it applies it if it can."""

    def register(make: Callable[[Node], Activation]) -> None:
        @lowers(*names)
        def rule(lowering: "Lowering", node: Node) -> None:
            name, function = lowering.value(node.args[0]), make(node)
            op = lowering.open(name)
            if op is not None and op.can_apply(function):
                op.activation = function
                lowering.extend(op, node.name)
            else:
                lowering.emit(Pointwise(node.name, [name], activation=function))

    return register


@activation("hardswish", "hardsigmoid", "sigmoid", "silu", "tanh")
def function(node: Node) -> Activation:
    return Activation(node.op.split(".")[1])


@activation("leaky_relu")
def leaky_relu(node: Node) -> Activation:
    _, slope = arguments(node, input=None, negative_slope=0.01)
    return Activation("leaky_relu", slope=float(slope))


@activation("relu")
def relu(node: Node) -> Activation:
    return Activation(low=0.0)


@activation("relu6")
def relu6(node: Node) -> Activation:
    return Activation(low=0.0, high=6.0)


@activation("hardtanh")
def hardtanh(node: Node) -> Activation:
    _, low, high = arguments(node, input=None, min_val=-1.0, max_val=1.0)
    return Activation(low=float(low), high=float(high))


@activation("clamp", "clamp_min")
def clamp(node: Node) -> Activation:
    _, low, high = arguments(node, input=None, min=None, max=None)
    for bound in (low, high):
        if not isinstance(bound, (int, float, type(None))):
            raise Unsupported("its bounds are computed")
    return Activation(low=-INFINITY if low is None else float(low), high=INFINITY if high is None else float(high))
