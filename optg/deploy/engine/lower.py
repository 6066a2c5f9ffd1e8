"""A captured graph -> what the engine runs, and what is left to torch.

Each node that the engine knows becomes an Op; a norm, an addition or an activation that follows a convolution becomes a part
of it. Reshapes that leave the order of numbers as it is are only another name for the same value.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from optg.deploy.engine.net import INFINITY, Activation, Concat, Conv, Mean, Op, Pair, Pointwise, Pool, Shape, Softmax, Window
from optg.deploy.graph import Graph, Node, Ref, dry_run, refs_in

PROBE = 8191  # a batch size that is hardly some other size of the model too; if it is, `Misfit` is met when it runs


@dataclass
class Lowered:
    """The whole model in the order it runs: Ops for the engine, Nodes for torch."""

    order: list[Op | Node] = field(default_factory=list)
    shapes: dict[str, Shape] = field(default_factory=dict)  # of the engine's values
    roots: dict[str, str] = field(default_factory=dict)  # a reshaped value -> the value whose numbers it has
    forms: dict[str, tuple[int, ...]] = field(default_factory=dict)  # of every value that begins with the batch, without it
    notes: list[str] = field(default_factory=list)

    def root(self, name: str) -> str:
        return self.roots.get(name, name)


class Unknown(Exception):
    """The engine does not know this operation, or not this form of it."""


def lower(graph: Graph) -> Lowered:
    return Lowering(graph).lower()


class Lowering:
    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.batch = PROBE if graph.dynamic else graph.shapes[0][0]
        self.meta: dict[str, Any] = dry_run(graph, PROBE)
        for name, shape, dtype in zip(graph.inputs, graph.shapes, graph.dtypes):
            sizes = tuple(PROBE if n is None else n for n in shape)
            self.meta[name] = torch.empty(sizes, dtype=dtype, device="meta")
        self.uses = Counter(n for node in graph.nodes for n in refs_in((node.args, node.kwargs)))
        self.uses.update(refs_in(graph.outputs))
        self.result = Lowered()
        self.made: dict[str, Op] = {}  # by the value's name

    def lower(self) -> Lowered:
        result = self.result
        for name, value in self.meta.items():
            if isinstance(value, (tuple, list)) and value and isinstance(value[0], Tensor):
                value = value[0]  # of several results only the first is ever ours
            if isinstance(value, Tensor) and value.dtype == torch.float32 and value.ndim >= 1 and value.shape[0] == self.batch:
                result.forms[name] = tuple(value.shape[1:])
                if value.ndim in (2, 4):
                    result.shapes[name] = (*value.shape[1:], *(1, 1)[: 4 - value.ndim])
        for node in self.graph.nodes:
            packet = node.op.split(".")[1]
            try:
                rule = RULES.get(packet)
                if rule is None or node.name not in result.forms:
                    raise Unknown
                rule(self, node)
            except Unknown as reason:
                result.order.append(node)
                if node.op.startswith("aten.") and not packet.startswith("sym_"):
                    detail = f": {reason}" if str(reason) else ""
                    result.notes.append(f"{node.name} ({node.op}) runs in torch{detail}")
        self.drop_dead()
        return result

    # ---- what the rules use

    def value(self, argument: Any) -> str:
        """The engine's value that an argument names."""
        if not isinstance(argument, Ref) or self.result.root(argument.name) not in self.result.shapes:
            raise Unknown("its input is no batch of images or features in float32")
        root = self.result.root(argument.name)
        if self.result.shapes.get(argument.name) != self.result.shapes[root]:
            raise Unknown("its input was reshaped")
        return root

    def tensor(self, argument: Any) -> np.ndarray | None:
        if argument is None:
            return None
        if not isinstance(argument, Ref) or argument.name not in self.graph.tensors:
            raise Unknown("its weight is computed")
        return self.graph.tensors[argument.name].detach().to(torch.float64).numpy()

    def refuse_indices(self, node: Node) -> None:
        """Of a maximum there are two results, and only the first is the engine's."""
        if isinstance(self.meta[node.name], (tuple, list)):
            for user in self.graph.nodes:
                if Ref(node.name) in user.args and user.args != (Ref(node.name), 0):
                    raise Unknown("its indices are used")

    def refuse_broadcast(self, node: Node, x: str, y: str) -> None:
        """Torch may also make more of two values that look the same here, of B×C×1×1 and B×C."""
        shapes = self.result.shapes
        if not shapes[x] == shapes[y] == shapes.get(node.name):
            raise Unknown("it broadcasts")

    def emit(self, op: Op) -> None:
        if op.output not in self.result.shapes:
            raise Unknown
        self.result.order.append(op)
        self.made[op.output] = op

    def same_numbers(self, node: Node, source: str) -> None:
        self.result.roots[node.name] = self.result.root(source)
        self.uses[self.result.root(source)] += self.uses[node.name] - 1

    def extend(self, op: Op, output: str) -> None:
        """Let an operation make a later value, and run when that would have been made."""
        del self.made[op.output]
        self.result.order.remove(op)
        op.output = output
        self.emit(op)

    def open(self, name: str) -> Op | None:
        """The operation that made a value, if it can still take something in: nothing else sees the value."""
        op = self.made.get(name)
        return op if op is not None and self.uses[name] == 1 and op.activation.nothing else None

    def drop_dead(self) -> None:
        result = self.result
        needed = {result.root(name) for name in refs_in(self.graph.outputs)}
        kept: list[Op | Node] = []
        for item in reversed(result.order):
            name = item.output if isinstance(item, Op) else item.name
            if name in needed:
                inputs = item.inputs if isinstance(item, Op) else list(refs_in((item.args, item.kwargs)))
                needed.update(map(result.root, inputs))
                kept.append(item)
        result.order = kept[::-1]


def pair(value: Any) -> Pair:
    if isinstance(value, int):
        return value, value
    if len(value) == 1:
        return value[0], value[0]
    return value[0], value[1]


def arguments(node: Node, **defaults: Any) -> list[Any]:
    """A node's arguments by name, in the order of `defaults`."""
    values = {**defaults, **dict(zip(defaults, node.args)), **node.kwargs}
    return [values[name] for name in defaults]


def conv2d(self: Lowering, node: Node) -> None:
    x, weight, bias, stride, padding, dilation, groups = arguments(
        node, input=None, weight=None, bias=None, stride=1, padding=0, dilation=1, groups=1
    )
    w = self.tensor(weight)
    if w is None or w.ndim != 4:
        raise Unknown("it is not two-dimensional")
    dilation, stride = pair(dilation), pair(stride)
    if isinstance(padding, str):
        extra = (dilation[0] * (w.shape[2] - 1), dilation[1] * (w.shape[3] - 1))
        padding = (0, 0) if padding == "valid" else (extra[0] // 2, extra[1] // 2)
    b = self.tensor(bias)
    window = Window((w.shape[2], w.shape[3]), stride, pair(padding), dilation)
    self.emit(Conv(node.name, [self.value(x)], w, np.zeros(w.shape[0]) if b is None else b, window, groups, weight.name))


def convolution(self: Lowering, node: Node) -> None:
    if node.args[6]:
        raise Unknown("it is transposed")
    conv2d(self, Node(node.name, node.op, (*node.args[:6], node.args[8])))


def linear(self: Lowering, node: Node) -> None:
    x, weight, bias = arguments(node, input=None, weight=None, bias=None)
    w = self.tensor(weight)
    if w is None or not isinstance(x, Ref) or len(self.result.forms.get(x.name, ())) != 1:
        raise Unknown("its input is no batch of features")
    root = self.result.root(x.name)
    if root not in self.result.shapes:
        raise Unknown("its input is no batch of features")
    shape = self.result.shapes[root]
    b = self.tensor(bias)
    w = w.reshape(-1, *shape)
    self.emit(Conv(node.name, [root], w, np.zeros(len(w)) if b is None else b, Window(shape[1:]), 1, weight.name))


def batch_norm(self: Lowering, node: Node) -> None:
    if "no_training" in node.op:
        x, weight, bias, mean, variance, _, eps = node.args
    else:
        x, weight, bias, mean, variance, training, _, eps, _ = node.args
        if training:
            raise Unknown("it norms by the batch")
    name = self.value(x)
    m, v = self.tensor(mean), self.tensor(variance)
    if m is None or v is None:
        raise Unknown("it norms by the batch")
    g, b = self.tensor(weight), self.tensor(bias)
    scale = (1.0 if g is None else g) / np.sqrt(v + eps)
    shift = (0.0 if b is None else b) - m * scale
    op = self.open(name)
    if isinstance(op, Conv) and len(op.inputs) == 1:
        op.weight, op.bias = op.weight * scale[:, None, None, None], op.bias * scale + shift
        self.extend(op, node.name)
    else:  # on its own it is a convolution too, of one weight per channel
        self.emit(Conv(node.name, [name], scale[:, None, None, None], shift, Window((1, 1)), len(scale), "norm"))


def add(self: Lowering, node: Node) -> None:
    a, b, alpha = arguments(node, input=None, other=None, alpha=1)
    x, y = self.value(a), self.value(b)
    self.refuse_broadcast(node, x, y)
    if not isinstance(alpha, (int, float)):
        raise Unknown("its factor is computed")
    candidates = [op for op in map(self.open, (x, y)) if isinstance(op, Conv) and len(op.inputs) == 1]
    if candidates and alpha == 1 and x != y:
        op = max(candidates, key=self.result.order.index)
        op.inputs.append(y if op.output == x else x)
        self.extend(op, node.name)
    else:
        self.emit(Pointwise(node.name, [x, y], "add", float(alpha)))


def mul(self: Lowering, node: Node) -> None:
    x, y = self.value(node.args[0]), self.value(node.args[1])
    self.refuse_broadcast(node, x, y)
    self.emit(Pointwise(node.name, [x, y], "mul"))


def activation(make: Callable[[Node], Activation]) -> Callable[[Lowering, Node], None]:
    def rule(self: Lowering, node: Node) -> None:
        name, function = self.value(node.args[0]), make(node)
        op = self.open(name)
        clamps = function.name == "plain"
        if isinstance(op, (Conv, Pointwise)) or (clamps and isinstance(op, Pool)):
            op.activation = function
            self.extend(op, node.name)
        else:
            self.emit(Pointwise(node.name, [name], activation=function))

    return rule


def hardtanh(node: Node) -> Activation:
    _, low, high = arguments(node, input=None, min_val=-1.0, max_val=1.0)
    return Activation(low=float(low), high=float(high))


def clamp(node: Node) -> Activation:
    _, low, high = arguments(node, input=None, min=None, max=None)
    for bound in (low, high):
        if not isinstance(bound, (int, float, type(None))):
            raise Unknown("its bounds are computed")
    return Activation(low=-INFINITY if low is None else float(low), high=INFINITY if high is None else float(high))


def named(name: str, node: Node) -> Activation:
    return Activation(name)


def leaky_relu(node: Node) -> Activation:
    _, slope = arguments(node, input=None, negative_slope=0.01)
    return Activation("leaky_relu", slope=float(slope))


def max_pool2d(self: Lowering, node: Node) -> None:
    x, kernel, stride, padding, dilation, _ = arguments(
        node, input=None, kernel_size=None, stride=(), padding=0, dilation=1, ceil_mode=False
    )
    self.refuse_indices(node)
    window = Window(pair(kernel), pair(stride or kernel), pair(padding), pair(dilation))
    self.emit(Pool(node.name, [self.value(x)], "max", window))


def avg_pool2d(self: Lowering, node: Node) -> None:
    x, kernel, stride, padding, _, count_padding, divisor = arguments(
        node, input=None, kernel_size=None, stride=(), padding=0, ceil_mode=False, count_include_pad=True, divisor_override=None
    )
    window = Window(pair(kernel), pair(stride or kernel), pair(padding))
    self.emit(Pool(node.name, [self.value(x)], "mean", window, bool(count_padding), divisor or 0))


def adaptive_pool(kind: str) -> Callable[[Lowering, Node], None]:
    def rule(self: Lowering, node: Node) -> None:
        name = self.value(node.args[0])
        self.refuse_indices(node)
        _, height, width = self.result.shapes[name]
        rows, columns = self.result.shapes[node.name][1:]
        if kind == "mean" and rows == columns == 1:
            self.emit(Mean(node.name, [name]))
        elif height % rows or width % columns:
            raise Unknown("its windows are not of one size")
        else:
            size = (height // rows, width // columns)
            self.emit(Pool(node.name, [name], "max" if kind == "max" else "mean", Window(size, size)))

    return rule


def mean(self: Lowering, node: Node) -> None:
    x, dims, _, dtype = arguments(node, input=None, dim=None, keepdim=False, dtype=None)
    name = self.value(x)
    if dims is None or dtype is not None or len(self.result.forms[node.name]) not in (1, 3):
        raise Unknown("it is not over height and width")
    if len(self.result.forms[x.name]) != 3 or sorted(d % 4 for d in dims) != [2, 3]:
        raise Unknown("it is not over height and width")
    self.emit(Mean(node.name, [name]))


def softmax(self: Lowering, node: Node) -> None:
    x, dim = node.args[0], node.args[1]
    name = self.value(x)
    if dim % (len(self.result.forms[x.name]) + 1) != 1:
        raise Unknown("it is not over the channels")
    self.emit(Softmax(node.name, [name]))


def cat(self: Lowering, node: Node) -> None:
    parts, dim = arguments(node, tensors=(), dim=0)
    names = [self.value(part) for part in parts]
    if dim % (len(self.result.forms[node.name]) + 1) != 1:
        raise Unknown("it is not along the channels")
    self.emit(Concat(node.name, names))


def reshape(self: Lowering, node: Node) -> None:
    source = node.args[0]
    if node.op == "aten.squeeze.default":
        raise Unknown("of one image it takes the batch too")
    if not isinstance(source, Ref) or self.result.root(source.name) not in self.result.shapes:
        raise Unknown
    if np.prod(self.result.forms[source.name]) != np.prod(self.result.forms[node.name]):
        raise Unknown
    self.same_numbers(node, source.name)


def getitem(self: Lowering, node: Node) -> None:
    source, index = node.args
    if index != 0 or source.name not in self.made:
        raise Unknown
    self.same_numbers(node, source.name)


RULES: dict[str, Callable[[Lowering, Node], None]] = {
    "conv2d": conv2d,
    "convolution": convolution,
    "linear": linear,
    "batch_norm": batch_norm,
    "_native_batch_norm_legit_no_training": batch_norm,
    "add": add,
    "mul": mul,
    "relu": activation(lambda node: Activation(low=0.0)),
    "relu6": activation(lambda node: Activation(low=0.0, high=6.0)),
    "hardtanh": activation(hardtanh),
    "clamp": activation(clamp),
    "clamp_min": activation(clamp),
    "leaky_relu": activation(leaky_relu),
    **{name: activation(partial(named, name)) for name in ("hardswish", "hardsigmoid", "sigmoid", "silu", "tanh")},
    "max_pool2d": max_pool2d,
    "max_pool2d_with_indices": max_pool2d,
    "avg_pool2d": avg_pool2d,
    "adaptive_avg_pool2d": adaptive_pool("mean"),
    "_adaptive_avg_pool2d": adaptive_pool("mean"),
    "adaptive_max_pool2d": adaptive_pool("max"),
    "mean": mean,
    "softmax": softmax,
    "_softmax": softmax,
    "cat": cat,
    **dict.fromkeys(("flatten", "view", "reshape", "_unsafe_view", "squeeze", "unsqueeze", "contiguous", "clone"), reshape),
    "getitem": getitem,
}  # fmt: skip
