"""Operations by name: how to look them up in torch, and which of them a packed file may use."""

import math
import operator
import re
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch._ops import OpOverload


def numbers_only(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a Python function on sizes: accept plain numbers only, and bound the result."""

    def checked(*values: Any) -> Any:
        if not all(isinstance(v, (int, float)) for v in values):
            raise TypeError("expected numbers")
        result = function(*values)
        if isinstance(result, int) and abs(result) >= 2**40:
            raise OverflowError(f"the size {float(result):g} is out of range")
        return result

    return checked


def get_item(values: Any, index: Any) -> Any:
    if not isinstance(values, (list, tuple)) or not isinstance(index, int):
        raise TypeError("expected a list of results and an integer index")
    return values[index]


PYTHON_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "operator.getitem": get_item,
    **{
        f"operator.{name}": numbers_only(getattr(operator, name))
        for name in ("add", "sub", "mul", "floordiv", "truediv", "mod", "neg", "eq", "ne", "lt", "le", "gt", "ge")
    },
    "torch.sym_max": numbers_only(max),
    "torch.sym_min": numbers_only(min),
    "torch.sym_float": numbers_only(float),
    "torch.sym_int": numbers_only(int),
    "math.floor": numbers_only(math.floor),
    "math.ceil": numbers_only(math.ceil),
    "math.trunc": numbers_only(math.trunc),
}

# The aten operations a packed file may use, in any overload that does not mutate its arguments. None of them reads files,
# draws random numbers, or accesses memory by address.
PERMITTED_ATEN = frozenset(
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
IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@cache
def resolve(op: str) -> Callable[..., Any]:
    """Return the function with this operation name."""
    if op in PYTHON_FUNCTIONS:
        return PYTHON_FUNCTIONS[op]
    namespace, name, overload = op.split(".")
    return getattr(getattr(getattr(torch.ops, namespace), name), overload)


def is_permitted(op: str) -> bool:
    """Return whether a packed file may use this operation. The name is checked before anything is looked up in torch."""
    if op in PYTHON_FUNCTIONS:
        return True
    parts = op.split(".")
    if len(parts) != 3 or parts[0] != "aten" or parts[1] not in PERMITTED_ATEN or not IDENTIFIER.fullmatch(parts[2]):
        return False
    found = getattr(getattr(torch.ops.aten, parts[1]), parts[2], None)
    if not isinstance(found, OpOverload) or found._schema.is_mutable:
        return False
    return torch._C._dispatch_has_kernel(found.name())  # excludes TorchScript's overloads for strings and lists


def all_overloads(*names: str) -> frozenset[str]:
    return frozenset(f"aten.{name}.{overload}" for name in names for overload in getattr(torch.ops.aten, name).overloads())


CREATION_OPS = all_overloads("arange", "eye", "full", "ones", "scalar_tensor", "zeros")  # make a tensor from no tensor
SPLITTING_OPS = all_overloads("chunk", "split", "split_with_sizes", "unbind", "unsafe_chunk", "unsafe_split")
