"""The operations of a graph: which there are, what they are in torch, and which of them a file may use."""

import math
import operator
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch._ops import OpOverload


class GraphError(ValueError):
    """A model that cannot be captured, or a graph that cannot be run."""


@dataclass(frozen=True)
class Ref:
    """The value of that name: an input, a tensor, or what an earlier node computed."""

    name: str


@dataclass(frozen=True)
class Node:
    """One operation. Arguments are plain values, dtypes, memory formats, Refs, and lists, tuples and dicts of them."""

    name: str
    op: str  # such as aten.conv2d.default; operator.getitem, operator.mul for parts of results and for sizes
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)


def require(fine: bool, problem: str) -> None:
    if not fine:
        raise GraphError(problem)


def refs_in(value: Any) -> Iterator[str]:
    """The names that an argument refers to."""
    if isinstance(value, Ref):
        yield value.name
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from refs_in(item)
    elif isinstance(value, dict):
        yield from refs_in(list(value.values()))


def on_sizes(compute: Callable[..., Any]) -> Callable[..., Any]:
    """An operation of Python's for sizes: plain numbers only, and of a bounded length."""

    def checked(*values: Any) -> Any:
        if not all(isinstance(v, (int, float)) for v in values):
            raise TypeError("expected numbers")
        result = compute(*values)
        if isinstance(result, int) and abs(result) >= 2**40:
            raise OverflowError(f"the size {float(result):g} is out of range")
        return result

    return checked


def part(values: Any, index: Any) -> Any:
    if not isinstance(values, (list, tuple)) or not isinstance(index, int):
        raise TypeError("expected the index of one of several results")
    return values[index]


PLAIN: dict[str, Callable[..., Any]] = {
    "operator.getitem": part,
    **{
        f"operator.{name}": on_sizes(getattr(operator, name))
        for name in ("add", "sub", "mul", "floordiv", "truediv", "mod", "neg", "eq", "ne", "lt", "le", "gt", "ge")
    },
    "torch.sym_max": on_sizes(max),
    "torch.sym_min": on_sizes(min),
    "torch.sym_float": on_sizes(float),
    "torch.sym_int": on_sizes(int),
    "math.floor": on_sizes(math.floor),
    "math.ceil": on_sizes(math.ceil),
    "math.trunc": on_sizes(math.trunc),
}

# Operations of aten, any overload that writes into nothing, that a file may use. None of them reads files, draws random
# numbers, or takes memory by address.
PURE = frozenset(
    """
    _adaptive_avg_pool2d _log_softmax _safe_softmax _softmax _to_copy _unsafe_view abs acos adaptive_avg_pool1d
    adaptive_avg_pool2d adaptive_avg_pool3d adaptive_max_pool1d adaptive_max_pool2d add addcdiv addcmul addmm addmv all amax
    amin any arange argmax argmin argsort asin atan atan2 atleast_1d atleast_2d atleast_3d avg_pool1d avg_pool2d avg_pool3d
    baddbmm batch_norm bitwise_and bitwise_not bitwise_or bitwise_xor bmm broadcast_to cat ceil celu channel_shuffle chunk
    clamp clamp_max clamp_min clip clone column_stack constant_pad_nd contiguous conv1d conv2d conv3d conv_transpose1d
    conv_transpose2d convolution copy cos cosh cosine_similarity cumprod cumsum diagonal div dot einsum elu embedding eq erf
    exp expand expand_as expm1 eye fill flatten flip floor floor_divide fmod frobenius_norm full full_like gather ge gelu glu
    grid_sampler grid_sampler_2d group_norm gt hardshrink hardsigmoid hardswish hardtanh hstack im2col index index_put
    index_select inner instance_norm isclose isfinite isinf isnan layer_norm le leaky_relu lerp linalg_norm linalg_vector_norm
    linear log log10 log1p log2 log_sigmoid log_softmax logaddexp logical_and logical_not logical_or logical_xor logit
    logsumexp lt masked_fill matmul max max_pool1d max_pool2d max_pool2d_with_indices max_pool3d maximum mean meshgrid min
    minimum mish mm moveaxis movedim mul mv nan_to_num narrow native_group_norm native_layer_norm ne neg new_full new_ones
    new_zeros norm numpy_T ones ones_like outer pad permute pixel_shuffle pixel_unshuffle pow prelu prod reciprocal
    reflection_pad1d reflection_pad2d relu relu6 remainder repeat repeat_interleave replication_pad1d replication_pad2d reshape
    reshape_as rms_norm roll round rsqrt rsub scalar_tensor scaled_dot_product_attention scatter select select_scatter selu
    sigmoid sign silu sin sinh slice slice_scatter softmax softplus softshrink sort split split_with_sizes sqrt square squeeze
    stack std std_mean sub sum swapaxes sym_numel sym_size sym_stride t take_along_dim tan tanh tensordot threshold tile to
    topk transpose tril triu true_divide type_as unbind unflatten unfold unsafe_chunk unsafe_split unsqueeze upsample_bicubic2d
    upsample_bilinear2d upsample_nearest1d upsample_nearest2d var var_mean view view_as vstack where zeros zeros_like
    """.split()  # noqa: SIM905
)
LARGEST = 2**63 - 1
WORD = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@cache
def resolve(op: str) -> Callable[..., Any]:
    """The function behind an operation's name."""
    if op in PLAIN:
        return PLAIN[op]
    namespace, name, overload = op.split(".")
    return getattr(getattr(getattr(torch.ops, namespace), name), overload)


def is_pure(op: str) -> bool:
    """May a file use this operation? Nothing is looked up in torch before its name is known to be harmless."""
    if op in PLAIN:
        return True
    parts = op.split(".")
    if len(parts) != 3 or parts[0] != "aten" or parts[1] not in PURE or not WORD.fullmatch(parts[2]):
        return False
    found = getattr(getattr(torch.ops.aten, parts[1]), parts[2], None)
    if not isinstance(found, OpOverload) or found._schema.is_mutable:
        return False
    return torch._C._dispatch_has_kernel(found.name())  # else it is one of TorchScript's, for strings and lists


def fits(value: Any, kind: str) -> bool:
    """Is this an argument of that kind, by torch's name of it? Where torch expects a dtype and gets a number, it crashes."""
    outer, _, inner = kind.removesuffix("]").partition("[")
    if outer == "Optional":
        return value is None or fits(value, inner)
    if outer == "List" and isinstance(value, (list, tuple)):
        return all(fits(v, inner) for v in value)
    if outer == "List":  # one number stands for as many as there should be
        return inner != "Tensor" and fits(value, inner)
    if isinstance(value, Ref):
        return kind in ("Tensor", "int", "float", "number")
    return type(value) in ACCEPTED.get(kind, ())


def largest_size(op: str) -> int:
    """Some kernels do not expect numbers near the end of their range: they crash, or never end."""
    if "slice" in op:
        return LARGEST  # that far goes a slice to the end
    return WINDOW if any(word in op for word in ("pool", "conv", "chunk")) else 2**31


WINDOW = 2**16


def within(value: Any, largest: int) -> bool:
    """Is no number larger, and no size of a window left open until the graph runs?"""
    if isinstance(value, Ref):
        return largest > WINDOW
    if isinstance(value, (list, tuple)):
        return all(within(v, largest) for v in value)
    return not isinstance(value, int) or -largest <= value <= largest


ACCEPTED: dict[str, tuple[type, ...]] = {
    "Tensor": (bool, int, float),  # a number stands for a tensor of it
    "int": (int,),
    "float": (int, float),
    "number": (bool, int, float),
    "bool": (bool,),
    "str": (str,),
    "Device": (torch.device,),
    "ScalarType": (torch.dtype,),
    "MemoryFormat": (torch.memory_format,),
}


def check_arguments(node: Node) -> None:
    """Refuse arguments of other kinds than the operation's."""
    if node.op in PLAIN:
        require(not node.kwargs, f"the node {node.name!r} has named arguments")
        return
    known = resolve(node.op)._schema.arguments  # type: ignore[attr-defined]
    require(len(node.args) <= len(known), f"the node {node.name!r} has more arguments than {node.op}")
    given = {**{a.name: v for a, v in zip(known, node.args)}, **node.kwargs}
    kinds = {argument.name: str(argument.real_type) for argument in known}
    for name, value in given.items():
        known_kind = name in kinds and fits(value, kinds[name])
        require(known_kind, f"the node {node.name!r} has an argument {name!r} that {node.op} has not")
        fine = "int" not in kinds[name] or within(value, largest_size(node.op))
        require(fine, f"the node {node.name!r} has an argument {name!r} that is out of range")


def overloads(*names: str) -> frozenset[str]:
    return frozenset(f"aten.{name}.{overload}" for name in names for overload in getattr(torch.ops.aten, name).overloads())


CREATING = overloads("arange", "eye", "full", "ones", "scalar_tensor", "zeros")  # operations that make tensors of no tensor
SPLITTING = overloads("chunk", "split", "split_with_sizes", "unbind", "unsafe_chunk", "unsafe_split")  # many tensors of one
