"""The operations between nodes that quantize -> operations on bytes."""

from math import prod
from typing import Any

import numpy as np

from optg.deploy.engine.int8.base import INFINITY
from optg.deploy.engine.int8.convolution import Convolution
from optg.deploy.engine.int8.copy import Flatten
from optg.deploy.engine.int8.lower import Int8Lowering, lowers
from optg.deploy.engine.int8.pointwise import Add, Concat, Table
from optg.deploy.engine.int8.pool import Pool
from optg.deploy.engine.ops.base import Unsupported, arguments, pair
from optg.deploy.engine.ops.reshape import removes_batch
from optg.deploy.engine.ops.window import Window
from optg.deploy.graph import Node, Ref, refs_in, resolve


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
    window = bounded(lowering, node, source, Window((w.shape[2], w.shape[3]), pair(stride), pair(padding), dilation))
    lowering.begin(Convolution(node.name, [source], [known], w, scales, bias_of(lowering, bias, w), window, groups, name), node)


@lowers("linear")
def linear(lowering: Int8Lowering, node: Node) -> None:
    x, weight, bias = arguments(node, input=None, weight=None, bias=None)
    source, known = lowering.source(x)
    if lowering.lowering.meta[x.name].ndim != 2:
        raise Unsupported("its input is not a batch of features")
    w, scales, name = lowering.weight(weight)
    w = w.reshape(*w.shape, 1, 1)
    op = Convolution(node.name, [source], [known], w, scales, bias_of(lowering, bias, w), Window((1, 1)), 1, name)
    lowering.begin(op, node)


def bounded(lowering: Int8Lowering, node: Node, source: str, window: Window) -> Window:
    """Return a window that needs little memory beside the image, or raise Unsupported."""
    if node.name not in lowering.shapes:
        raise Unsupported
    return window.bounded(lowering.shapes[source], lowering.shapes[node.name])


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
    if low != low or high != high:
        raise Unsupported("a bound is NaN")
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
    window = bounded(lowering, node, source, Window(pair(kernel), pair(stride or kernel), pair(padding), pair(dilation)))
    lowering.begin(Pool(node.name, [source], [known], "max", window), node)


@lowers("avg_pool2d")
def avg_pool2d(lowering: Int8Lowering, node: Node) -> None:
    x, kernel, stride, padding, _, count_padding, divisor = arguments(
        node, input=None, kernel_size=None, stride=(), padding=0, ceil_mode=False, count_include_pad=True, divisor_override=None
    )
    source, known = lowering.source(x)
    window = bounded(lowering, node, source, Window(pair(kernel), pair(stride or kernel), pair(padding)))
    lowering.begin(Pool(node.name, [source], [known], "mean", window, bool(count_padding), divisor or 0), node)


@lowers("adaptive_avg_pool2d", "mean")
def mean(lowering: Int8Lowering, node: Node) -> None:
    source, known = lowering.source(node.args[0])
    (_, height, width), (_, rows, columns) = lowering.shapes[source], lowering.shapes.get(node.name, (0, 0, 0))
    if "mean" in node.op:
        _, dims, _, dtype = arguments(node, input=None, dim=None, keepdim=False, dtype=None)
        if (
            dtype is not None
            or isinstance(dims, int)
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
    if before is None or after is None or prod(before) != prod(after) or x.name not in lowering.lowering.forms:
        raise Unsupported
    if "squeeze." in node.op and removes_batch(lowering.lowering, node):
        raise Unsupported("it also removes the batch dimension of a single image")
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
