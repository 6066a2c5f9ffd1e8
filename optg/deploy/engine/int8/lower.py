"""Quantize and dequantize nodes, and the operations between them -> operations on bytes.

In a quantized graph every operation computes with floats, between nodes that dequantize its inputs and a node that quantizes
its result (graph/int8.py). The rules here and in rules.py turn such a pattern into one operation on bytes. An operation is
*open* until the node that quantizes its result is found: a sum, an activation or a reshape may come before. Whatever needs the
float value of an open operation, or of a dequantized value, gets it as a torch tensor.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from optg.deploy.engine.int8.base import Int8Op, Quantization
from optg.deploy.engine.int8.copy import Dequantize, Quantize
from optg.deploy.engine.memory import Shape
from optg.deploy.engine.ops.base import Unsupported
from optg.deploy.graph import Node, Ref, hidden_bytes, refs_in

if TYPE_CHECKING:
    from optg.deploy.engine.lower import Lowering

Rule = Callable[["Int8Lowering", Node], None]
RULES: dict[str, Rule] = {}  # by the torch operation's name


def lowers(*names: str) -> Callable[[Rule], Rule]:
    """Register a rule that turns nodes of these torch operations into operations on bytes, or raises Unsupported."""

    def register(rule: Rule) -> Rule:
        RULES.update(dict.fromkeys(names, rule))
        return rule

    return register


class Int8Lowering:
    """What the rules read and change."""

    def __init__(self, lowering: "Lowering") -> None:
        self.lowering = lowering
        self.known: dict[str, Quantization] = {}  # values that are bytes
        self.bytes_of: dict[str, str] = {}  # a dequantized value, or another name of bytes -> the bytes
        self.open: dict[str, Int8Op] = {}  # operations whose result is not quantized yet, by the float value
        self.weights: dict[str, Node] = {}  # nodes that dequantize a weight, until something needs the floats
        self.hidden = hidden_bytes(lowering.graph)
        self.shapes: dict[str, Shape] = {}
        batch = lowering.batch
        for name, value in lowering.meta.items():
            if isinstance(value, torch.Tensor) and value.numel() and value.ndim in (2, 4) and value.shape[0] == batch:
                self.shapes[name] = (*value.shape[1:], *(1, 1)[: 4 - value.ndim])

    def lower(self, node: Node) -> bool:
        """Turn a node into an operation on bytes. Return whether that was possible."""
        packet = node.op.split(".")[1]
        if packet not in RULES:
            return False
        try:
            RULES[packet](self, node)
        except Unsupported as reason:
            if str(reason):
                self.lowering.notes.append(f"{node.name} ({node.op}) does not run on bytes: {reason}")
            return False
        return True

    # ---- what the rules use

    def source(self, argument: Any) -> tuple[str, Quantization]:
        """Return the bytes that an argument was dequantized from."""
        if not isinstance(argument, Ref) or argument.name not in self.bytes_of:
            raise Unsupported
        if self.lowering.meta[argument.name].dtype != torch.float32:
            raise Unsupported("it computes with bytes")
        name = self.bytes_of[argument.name]
        return name, self.known[name]

    def used_once(self, argument: Any) -> Int8Op | None:
        """Return the open operation that computes an argument, if nothing else needs the float value."""
        once = isinstance(argument, Ref) and self.lowering.uses[argument.name] == 1
        return self.open.get(argument.name) if once else None

    def begin(self, op: Int8Op, node: Node) -> None:
        """Add an operation whose result is still to be quantized."""
        if op.output not in self.shapes:
            raise Unsupported
        op.nodes.append(node)
        self.open[op.output] = op

    def extend(self, op: Int8Op, node: Node) -> None:
        """Let an open operation compute a later value."""
        del self.open[op.output]
        op.output = node.name
        self.begin(op, node)

    def close(self, op: Int8Op, output: str, result: Quantization | None) -> bool:
        """Add an open operation to the program. If it cannot run on bytes, leave its nodes to the floats."""
        del self.open[op.output]
        value = op.output
        try:
            if result is None and not op.can_be_real:
                raise Unsupported
            op.close(output, result)
        except Unsupported as reason:
            if str(reason):
                self.lowering.notes.append(f"{value} ({op.nodes[0].op}) does not run on bytes: {reason}")
            for node in op.nodes:
                self.need_floats((node.args, node.kwargs))
                self.lowering.lower_float(node)
            return False
        self.emit(op)
        return True

    def emit(self, op: Int8Op) -> None:
        self.lowering.order.append(op)
        if op.result is not None:
            self.known[op.output] = op.result
            self.bytes_of[op.output] = op.output
            value = self.lowering.meta.get(op.output)
            self.lowering.forms[op.output] = self.shapes[op.output] if value is None else tuple(value.shape[1:])

    def need_floats(self, arguments: Any) -> None:
        """Make torch tensors of all arguments that only exist as bytes, or that an open operation computes."""
        for name in refs_in(arguments):
            if name in self.open:
                self.close(self.open[name], name, None)
            elif name in self.weights:
                self.lowering.lower_float(self.weights.pop(name))
            elif name in self.bytes_of and name not in self.known:
                source = self.bytes_of.pop(name)
                self.emit(Dequantize(name, [source], [self.known[source]]))

    def weight(self, argument: Any) -> tuple[np.ndarray, np.ndarray, str]:
        """Return a weight's integers, the scale of each output channel, and the weight's name."""
        if not isinstance(argument, Ref) or argument.name not in self.weights:
            raise Unsupported("its weight is not quantized")
        values, scales = self.weights[argument.name].args
        tensors = self.lowering.graph.tensors
        if values.name not in tensors or scales.name not in tensors:
            raise Unsupported("its weight is computed")
        return tensors[values.name].numpy(), tensors[scales.name].double().numpy(), values.name


# ---- nodes that quantize


@lowers("quantize_u8")
def quantize(lowering: Int8Lowering, node: Node) -> None:
    x, result = node.args[0], quantization(node)
    known = lowering.known.get(lowering.bytes_of.get(x.name, ""))
    if known == result and node.name in lowering.hidden:  # only reshaped since
        lowering.bytes_of[node.name] = lowering.bytes_of[x.name]
        return
    op = lowering.used_once(x)
    if op is not None and lowering.close(op, node.name, result):
        return
    value = lowering.lowering.meta.get(x.name)  # None if it is a stored tensor
    if node.name not in lowering.shapes or value is None or value.dtype != torch.float32:
        raise Unsupported("it is not a batch of images or features in float32")
    lowering.need_floats(x)
    lowering.emit(Quantize(node.name, [x.name], [], result=result))


@lowers("dequantize_u8")
def dequantize(lowering: Int8Lowering, node: Node) -> None:
    x, expected = node.args[0], quantization(node)
    if x.name not in lowering.bytes_of or lowering.known[lowering.bytes_of[x.name]] != expected:
        raise Unsupported("it was quantized otherwise")
    lowering.bytes_of[node.name] = lowering.bytes_of[x.name]


@lowers("dequantize_s8")
def dequantize_weight(lowering: Int8Lowering, node: Node) -> None:
    lowering.weights[node.name] = node


def quantization(node: Node) -> Quantization:
    _, scale, zero_point = node.args
    return Quantization.checked(scale, zero_point)


@lowers("quantize_per_tensor", "dequantize_per_tensor", "dequantize_per_channel")
def refuse_pt2e(lowering: Int8Lowering, node: Node) -> None:
    raise Unsupported("it quantizes otherwise than to bytes with a scale and a zero point, or signed weights with scales")
