"""The operations that a packed file may use, and the domain of each of their arguments.

These are the operations that exported models of torchvision, timm and transformers use. They compute values from values:
none of them reads files, draws random numbers, or returns a shape that depends on data. Operations that crash on some values,
such as the division of integers, are absent or limited to floats.
"""

import math
import operator
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

# Operations of torch.ops.aten with these arguments. `domains.py` says what each domain accepts; `?` also accepts None, and `*`
# is a list. An argument that is not listed may not be given.
OPERATIONS = {
    # products and convolutions
    "conv1d.default conv2d.default": (
        "input=float weight=float bias=float? stride=steps padding=padding dilation=steps groups=count"
    ),
    "conv2d.padding": "input=float weight=float bias=float? stride=steps padding=same dilation=steps groups=count",
    "convolution.default": (
        "input=float weight=float bias=float? stride=steps padding=padding dilation=steps transposed=no "
        "output_padding=padding groups=count"
    ),
    "conv_transpose2d.input": (
        "input=float weight=float bias=float? stride=steps padding=padding output_padding=padding groups=count dilation=steps"
    ),
    "linear.default": "input=float weight=float bias=float?",
    "matmul.default": "self=float other=float",
    "mm.default bmm.default": "self=float mat2=float",
    "addmm.default": "self=float mat1=float mat2=float beta=number alpha=number",
    "baddbmm.default": "self=float batch1=float batch2=float beta=number alpha=number",
    "einsum.default": "equation=equation tensors=pair",
    "scaled_dot_product_attention.default": (
        "query=float key=float value=float attn_mask=real? dropout_p=zero is_causal=bool scale=number? enable_gqa=bool"
    ),
    # norms
    "batch_norm.default": (
        "input=float weight=float? bias=float? running_mean=float? running_var=float? training=bool momentum=number eps=number "
        "cudnn_enabled=bool"
    ),
    "layer_norm.default": "input=float normalized_shape=sizes weight=float? bias=float? eps=number cudnn_enable=bool",
    "native_layer_norm.default": "input=float normalized_shape=sizes weight=float? bias=float? eps=number",
    "rms_norm.default": "input=float normalized_shape=sizes weight=float? eps=number?",
    "group_norm.default": "input=float num_groups=count weight=float? bias=float? eps=number cudnn_enabled=bool",
    # pooling and resizing
    "max_pool2d.default max_pool2d_with_indices.default": (
        "self=float kernel_size=steps stride=stride padding=padding dilation=steps ceil_mode=bool"
    ),
    "avg_pool1d.default": "self=float kernel_size=steps stride=stride padding=padding ceil_mode=bool count_include_pad=bool",
    "avg_pool2d.default": (
        "self=float kernel_size=steps stride=stride padding=padding ceil_mode=bool count_include_pad=bool "
        "divisor_override=count?"
    ),
    "adaptive_avg_pool1d.default adaptive_avg_pool2d.default _adaptive_avg_pool2d.default adaptive_max_pool2d.default": (
        "self=float output_size=steps"
    ),
    "upsample_nearest2d.vec": "input=float output_size=steps? scale_factors=scales?",
    "upsample_bilinear2d.vec upsample_bicubic2d.vec": (
        "input=float output_size=steps? align_corners=bool scale_factors=scales?"
    ),
    "pixel_shuffle.default": "self=float upscale_factor=count",
    "im2col.default": "self=float kernel_size=steps dilation=steps padding=padding stride=steps",
    # activations
    "relu6.default hardsigmoid.default hardswish.default silu.default mish.default": "self=float",
    "relu.default sigmoid.default tanh.default": "self=real",
    "gelu.default": "self=float approximate=gelu",
    "hardtanh.default": "self=float min_val=number max_val=number",
    "leaky_relu.default": "self=float negative_slope=number",
    "elu.default": "self=float alpha=number scale=number input_scale=number",
    "softplus.default": "self=float beta=number threshold=number",
    "prelu.default": "self=float weight=float",
    "softmax.int log_softmax.int": "self=float dim=dim dtype=dtype?",
    "_softmax.default _log_softmax.default": "self=float dim=dim half_to_float=no",
    # arithmetic
    "add.Tensor sub.Tensor": "self=operand other=operand alpha=number",
    "mul.Tensor div.Tensor multiply.Tensor": "self=operand other=operand",
    "addcmul.default": "self=real tensor1=real tensor2=real value=number",
    "div.Tensor_mode": "self=float other=operand rounding_mode=floor",
    "rsub.Scalar": "self=real other=number alpha=number",
    "pow.Tensor_Scalar": "self=real exponent=number",
    "pow.Tensor_Tensor": "self=float exponent=float",
    "pow.Scalar": "self=number exponent=float",
    "neg.default abs.default square.default reciprocal.default sqrt.default rsqrt.default exp.default log.default": "self=real",
    "sin.default cos.default erf.default floor.default ceil.default": "self=real",
    "clamp.default": "self=real min=number? max=number?",
    "clamp_min.default": "self=real min=number",
    "maximum.default minimum.default min.other": "self=real other=real",
    # comparisons and masks
    "eq.Scalar ne.Scalar lt.Scalar le.Scalar gt.Scalar ge.Scalar": "self=real other=number",
    "eq.Tensor ne.Tensor lt.Tensor le.Tensor gt.Tensor ge.Tensor": "self=real other=real",
    "bitwise_and.Tensor bitwise_or.Tensor __and__.Tensor __or__.Tensor": "self=mask other=mask",
    "bitwise_not.default logical_not.default": "self=mask",
    "masked_fill.Scalar": "self=real mask=mask value=number",
    "where.self": "condition=mask self=real other=real",
    "where.ScalarOther": "condition=mask self=real other=number",
    "where.ScalarSelf": "condition=mask self=number other=real",
    # reductions
    "mean.dim": "self=float dim=dims? keepdim=bool dtype=dtype?",
    "linalg_vector_norm.default": "self=float ord=number dim=dims? keepdim=bool dtype=dtype?",
    "sum.dim_IntList": "self=real dim=dims? keepdim=bool dtype=dtype?",
    "amax.default amin.default": "self=real dim=dims keepdim=bool",
    "max.dim argmax.default": "self=real dim=dim keepdim=bool",
    "var.correction std.correction": "self=float dim=dims? correction=number? keepdim=bool",
    "var.dim std.dim": "self=float dim=dims? unbiased=bool keepdim=bool",
    "cumsum.default": "self=real dim=dim dtype=dtype?",
    # shapes
    "reshape.default": "self=real shape=extents",
    "view.default _unsafe_view.default": "self=real size=extents",
    "flatten.using_ints": "self=real start_dim=dim end_dim=dim",
    "unflatten.int": "self=real dim=dim sizes=extents",
    "squeeze.default t.default": "self=real",
    "squeeze.dim unsqueeze.default unbind.int sym_size.int": "self=real dim=dim",
    "squeeze.dims": "self=real dim=dims",
    "permute.default flip.default": "self=real dims=dims",
    "transpose.int": "self=real dim0=dim dim1=dim",
    "swapaxes.default": "self=real axis0=dim axis1=dim",
    "expand.default": "self=real size=extents implicit=bool",
    "expand_as.default reshape_as.default type_as.default": "self=real other=real",
    "repeat.default": "self=real repeats=extents",
    "tile.default": "self=real dims=extents",
    "repeat_interleave.self_int": "self=real repeats=count dim=dim?",
    "contiguous.default clone.default": "self=real memory_format=format?",
    "cat.default stack.default": "tensors=real* dim=dim",
    "chunk.default": "self=real chunks=count dim=dim",
    "split.Tensor": "self=real split_size=count dim=dim",
    "split_with_sizes.default": "self=real split_sizes=sizes dim=dim",
    "roll.default": "self=real shifts=shifts dims=dims",
    "pad.default": "self=real pad=border mode=edge value=number?",
    "constant_pad_nd.default": "self=real pad=border value=number",
    # parts of a tensor
    "select.int": "self=real dim=dim index=position",
    "slice.Tensor": "self=real dim=dim start=position? end=position? step=count",
    "select_scatter.default": "self=real src=real dim=dim index=position",
    "slice_scatter.default": "self=real src=real dim=dim start=position? end=position? step=count",
    "unfold.default": "self=real dimension=dim size=count step=count",
    "index.Tensor": "self=real indices=index?*",
    "index_select.default gather.default": "self=real dim=dim index=index",
    "embedding.default": "weight=float indices=index padding_idx=position",
    "copy.default": "self=real src=real",
    "fill.Tensor": "self=real value=real",
    "fill.Scalar": "self=real value=number",
    "zero.default": "self=real",
    # new tensors and dtypes
    "arange.default": "end=bound dtype=dtype? device=device",
    "arange.start": "start=bound end=bound dtype=dtype? device=device",
    "arange.start_step": "start=bound end=bound step=count dtype=dtype? device=device",
    "zeros.default ones.default": "size=sizes dtype=dtype? device=device",
    "full.default": "size=sizes fill_value=number dtype=dtype? device=device",
    "eye.m": "n=count m=count dtype=dtype? device=device",
    "meshgrid.indexing": "tensors=real* indexing=indexing",
    "new_zeros.default new_ones.default": "self=real size=sizes dtype=dtype?",
    "zeros_like.default ones_like.default": "self=real dtype=dtype? memory_format=format?",
    "full_like.default": "self=real fill_value=number dtype=dtype? memory_format=format?",
    "_to_copy.default": "self=real dtype=dtype? non_blocking=bool memory_format=format?",
    "to.dtype to.dtype_layout": "self=real dtype=dtype? non_blocking=bool copy=bool memory_format=format?",
    "to.device": "self=real device=device dtype=dtype non_blocking=bool copy=bool memory_format=format?",
}
# Operations of torch.ops.optg (int8.py)
OWN_OPERATIONS = {
    "quantize_u8.default": "input=single scale=scale zero_point=byte",
    "dequantize_u8.default": "input=bytes scale=scale zero_point=byte",
    "dequantize_s8.default": "weight=signed scale=single",
}
DOMAINS_OF: dict[str, dict[str, str]] = {
    f"{namespace}.{name}": dict(argument.split("=") for argument in arguments.split())
    for namespace, table in (("aten", OPERATIONS), ("optg", OWN_OPERATIONS))
    for names, arguments in table.items()
    for name in names.split()
}
CREATION_OPS = {  # make a tensor from no tensor
    f"aten.{name}.{overload}"
    for name in ("arange", "eye", "full", "ones", "scalar_tensor", "zeros")
    for overload in getattr(torch.ops.aten, name).overloads()
}


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


def is_permitted(op: str) -> bool:
    """Return whether a packed file may use this operation."""
    return op in DOMAINS_OF or op in PYTHON_FUNCTIONS


@cache
def resolve(op: str) -> Callable[..., Any]:
    """Return the function with this operation name."""
    if op in PYTHON_FUNCTIONS:
        return PYTHON_FUNCTIONS[op]
    namespace, name, overload = op.split(".")
    return getattr(getattr(getattr(torch.ops, namespace), name), overload)
