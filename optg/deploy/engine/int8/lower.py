"""Quantize and dequantize nodes, and the operations between them -> operations on bytes.

In a quantized graph of torch's PT2E flow every operation computes with floats, between nodes that dequantize its inputs and a
node that quantizes its result. The rules here turn such a pattern into one operation on bytes. An operation is *open* until the
node that quantizes its result is found: a sum, an activation or a reshape may come before. Whatever needs the float value of
an open operation, or of a dequantized value, gets it as a torch tensor.
"""

from collections.abc import Callable
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from optg.deploy.engine.int8.base import INFINITY, Int8Op, Quantization
from optg.deploy.engine.int8.convolution import Convolution
from optg.deploy.engine.int8.copy import Dequantize, Flatten, Quantize
from optg.deploy.engine.int8.pointwise import Add, Concat, Table
from optg.deploy.engine.int8.pool import Pool
from optg.deploy.engine.memory import Shape
from optg.deploy.engine.ops.base import Unsupported, arguments, pair
from optg.deploy.engine.ops.window import Window
from optg.deploy.graph import Node, Ref, refs_in, resolve

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
        self.shapes: dict[str, Shape] = {}
        batch = lowering.batch
        for name, value in lowering.meta.items():
            if isinstance(value, torch.Tensor) and value.ndim in (2, 4) and value.shape[0] == batch:
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
        values, scales, zero_points, axis, *_ = self.weights[argument.name].args
        tensors = self.lowering.graph.tensors
        if axis != 0 or not all(isinstance(v, Ref) and v.name in tensors for v in (values, scales, zero_points)):
            raise Unsupported("its weight is not quantized by output channel")
        if tensors[values.name].dtype != torch.int8 or tensors[zero_points.name].any():
            raise Unsupported("its weight is not quantized symmetrically to int8")
        return tensors[values.name].numpy(), tensors[scales.name].double().numpy(), values.name


# ---- nodes that quantize


@lowers("quantize_per_tensor")
def quantize_per_tensor(lowering: Int8Lowering, node: Node) -> None:
    x, result = node.args[0], quantization(node)
    if x.name in lowering.bytes_of and lowering.known[lowering.bytes_of[x.name]] == result:  # only reshaped since
        lowering.bytes_of[node.name] = lowering.bytes_of[x.name]
        return
    op = lowering.used_once(x)
    if op is not None and lowering.close(op, node.name, result):
        return
    if node.name not in lowering.shapes or lowering.lowering.meta[x.name].dtype != torch.float32:
        raise Unsupported("it is not a batch of images or features in float32")
    lowering.need_floats(x)
    lowering.emit(Quantize(node.name, [x.name], [], result=result))


@lowers("dequantize_per_tensor")
def dequantize_per_tensor(lowering: Int8Lowering, node: Node) -> None:
    x, expected = node.args[0], quantization(node)
    if x.name not in lowering.bytes_of or lowering.known[lowering.bytes_of[x.name]] != expected:
        raise Unsupported("it was quantized otherwise")
    lowering.bytes_of[node.name] = lowering.bytes_of[x.name]


@lowers("dequantize_per_channel")
def dequantize_per_channel(lowering: Int8Lowering, node: Node) -> None:
    lowering.weights[node.name] = node


def quantization(node: Node) -> Quantization:
    _, scale, zero_point, *kind = node.args
    if kind != [0, 255, torch.uint8] or not isinstance(scale, float) or not isinstance(zero_point, int):
        raise Unsupported("it does not quantize to bytes")
    return Quantization.checked(scale, zero_point)


# ---- operations between them


@lowers("conv2d")
def conv2d(lowering: Int8Lowering, node: Node) -> None:
    x, weight, bias, stride, padding, dilation, groups = arguments(
        node, input=None, weight=None, bias=None, stride=1, padding=0, dilation=1, groups=1
    )
    source, known = lowering.source(x)
    w, scales, name = lowering.weight(weight)
    if w.ndim != 4:
        raise Unsupported("it is not two-dimensional")
    dilation = pair(dilation)
    if isinstance(padding, str):
        extra = [d * (k - 1) for d, k in zip(dilation, w.shape[2:])]
        padding = (0, 0) if padding == "valid" else (extra[0] // 2, extra[1] // 2)
    window = Window((w.shape[2], w.shape[3]), pair(stride), pair(padding), dilation)
    lowering.begin(Convolution(node.name, [source], [known], w, scales, bias_of(lowering, bias, w), window, groups, name), node)


@lowers("linear")
def linear(lowering: Int8Lowering, node: Node) -> None:
    x, weight, bias = arguments(node, input=None, weight=None, bias=None)
    source, known = lowering.source(x)
    if lowering.shapes.get(x.name, ())[1:] != (1, 1):
        raise Unsupported("its input is not a batch of features")
    w, scales, name = lowering.weight(weight)
    w = w.reshape(*w.shape, 1, 1)
    op = Convolution(node.name, [source], [known], w, scales, bias_of(lowering, bias, w), Window((1, 1)), 1, name)
    lowering.begin(op, node)


def bias_of(lowering: Int8Lowering, bias: Any, weight: np.ndarray) -> np.ndarray:
    values = lowering.lowering.tensor(bias)
    return np.zeros(len(weight)) if values is None else values


@lowers("add")
def add(lowering: Int8Lowering, node: Node) -> None:
    a, b, alpha = arguments(node, input=None, other=None, alpha=1)
    for x, y in ((a, b), (b, a)):
        op = lowering.used_once(x)
        if op is not None and op.can_add and op.can_clamp and op.clamp_label == "" and alpha == 1:
            name, known = lowering.source(y)
            require_one_shape(lowering, node, x, y)
            op.inputs.append(name)
            op.quantized.append(known)
            return lowering.extend(op, node)
    (x, x_known), (y, y_known) = lowering.source(a), lowering.source(b)
    require_one_shape(lowering, node, a, b)
    if alpha != 1:
        raise Unsupported("it multiplies an operand")
    lowering.begin(Add(node.name, [x, y], [x_known, y_known]), node)


def require_one_shape(lowering: Int8Lowering, node: Node, a: Ref, b: Ref) -> None:
    meta = lowering.lowering.meta
    if not meta[a.name].shape == meta[b.name].shape == meta[node.name].shape:
        raise Unsupported("it broadcasts")


@lowers("relu", "relu6", "hardtanh", "clamp", "clamp_min")
def clamp(lowering: Int8Lowering, node: Node) -> None:
    op = lowering.used_once(node.args[0])
    low, high = clamp_bounds(node)
    if op is not None and op.can_clamp:
        op.low, op.high = (min(max(bound, low), high) for bound in (op.low, op.high))
        lowering.extend(op, node)
    else:
        function(lowering, node)


def clamp_bounds(node: Node) -> tuple[float, float]:
    packet = node.op.split(".")[1]
    if packet in ("relu", "relu6"):
        return 0.0, INFINITY if packet == "relu" else 6.0
    defaults = {"min": -1.0, "max": 1.0} if packet == "hardtanh" else {"min": None, "max": None}
    _, *bounds = arguments(Node(node.name, node.op, node.args), input=None, **defaults)
    named = {key.removesuffix("_val"): value for key, value in node.kwargs.items()}
    low, high = (named.get(key, value) for key, value in zip(("min", "max"), bounds))
    if not all(isinstance(bound, (int, float, type(None))) for bound in (low, high)):
        raise Unsupported("its bounds are computed")
    return -INFINITY if low is None else float(low), INFINITY if high is None else float(high)


@lowers("hardswish", "hardsigmoid", "sigmoid", "silu", "tanh", "leaky_relu", "gelu", "elu")
def function(lowering: Int8Lowering, node: Node) -> None:
    x, *rest = node.args
    source, known = lowering.source(x)
    if any(refs_in((rest, node.kwargs))):
        raise Unsupported("an argument is computed")
    compute = resolve(node.op)
    label = node.op.split(".")[1]
    lowering.begin(Table(node.name, [source], [known], lambda reals: compute(reals, *rest, **node.kwargs), label), node)


@lowers("max_pool2d")
def max_pool2d(lowering: Int8Lowering, node: Node) -> None:
    x, kernel, stride, padding, dilation, _ = arguments(
        node, input=None, kernel_size=None, stride=(), padding=0, dilation=1, ceil_mode=False
    )
    source, known = lowering.source(x)
    window = Window(pair(kernel), pair(stride or kernel), pair(padding), pair(dilation))
    lowering.begin(Pool(node.name, [source], [known], "max", window), node)


@lowers("avg_pool2d")
def avg_pool2d(lowering: Int8Lowering, node: Node) -> None:
    x, kernel, stride, padding, _, count_padding, divisor = arguments(
        node, input=None, kernel_size=None, stride=(), padding=0, ceil_mode=False, count_include_pad=True, divisor_override=None
    )
    source, known = lowering.source(x)
    window = Window(pair(kernel), pair(stride or kernel), pair(padding))
    lowering.begin(Pool(node.name, [source], [known], "mean", window, bool(count_padding), divisor or 0), node)


@lowers("adaptive_avg_pool2d", "mean")
def mean(lowering: Int8Lowering, node: Node) -> None:
    source, known = lowering.source(node.args[0])
    (_, height, width), (_, rows, columns) = lowering.shapes[source], lowering.shapes.get(node.name, (0, 0, 0))
    if "mean" in node.op:
        _, dims, _, dtype = arguments(node, input=None, dim=None, keepdim=False, dtype=None)
        if (
            dtype is not None
            or lowering.lowering.meta[node.args[0].name].ndim != 4
            or sorted(d % 4 for d in dims or ()) != [2, 3]
        ):
            raise Unsupported("it is not over height and width")
    if not rows or height % rows or width % columns:
        raise Unsupported("its windows differ in size")
    size = (height // rows, width // columns)
    lowering.begin(Pool(node.name, [source], [known], "mean", Window(size, size)), node)


@lowers("cat")
def cat(lowering: Int8Lowering, node: Node) -> None:
    parts, dim = arguments(node, tensors=(), dim=0)
    if not isinstance(parts, (list, tuple)):
        raise Unsupported("its inputs are the parts of one tensor")
    sources = [lowering.source(part) for part in parts]
    if dim % lowering.lowering.meta[node.name].ndim != 1:
        raise Unsupported("it is not along the channels")
    lowering.begin(Concat(node.name, [name for name, _ in sources], [known for _, known in sources]), node)


@lowers("flatten", "view", "reshape", "squeeze", "unsqueeze", "contiguous", "clone")
def reshape(lowering: Int8Lowering, node: Node) -> None:
    x = node.args[0]
    before, after = (lowering.shapes.get(name) for name in (getattr(x, "name", ""), node.name))
    if before is None or after is None or prod(before) != prod(after):
        raise Unsupported
    op = lowering.used_once(x)
    if op is not None and before == after:
        return lowering.extend(op, node)
    source, known = lowering.source(x)
    if before != after:
        if after[1:] != (1, 1):
            raise Unsupported("it reshapes an image")
        flat = f"{node.name} as bytes"
        lowering.shapes[flat] = after
        lowering.emit(Flatten(flat, [source], [known], result=known))
        source = flat
    lowering.bytes_of[node.name] = source
