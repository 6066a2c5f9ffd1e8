"""A model as data: its operations in order and its tensors by name, captured with torch.export.

A packed file stores this graph, the engine lowers it, and `run` interprets it with torch's own operations. A graph that came
from a file holds none but the operations of `PURE`: they compute values from values, and can reach nothing else.
"""

import math
import operator
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor, fx, nn
from torch._ops import OpOverload
from torch.export import Dim, ExportedProgram, ShapesCollection
from torch.export.graph_signature import InputKind, OutputKind, TensorArgument
from torch.utils import _pytree as pytree

from optg.accounting import as_arguments, first_tensor, undisturbed
from optg.weights import bare

Kind = Literal["parameter", "buffer", "constant"]  # a constant is not in the state_dict
KINDS: tuple[Kind, ...] = ("parameter", "buffer", "constant")


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


@dataclass
class Graph:
    inputs: list[str]
    shapes: list[tuple[int | None, ...]]  # of each input; None: any size, the batch's
    dtypes: list[torch.dtype]
    nodes: list[Node]  # in an order in which they can run; none without a use
    outputs: Any  # a Ref, or tuples, lists and dicts of Refs and plain values
    tensors: dict[str, Tensor]  # on the CPU, each once, under its first name in the state_dict
    kinds: dict[str, Kind]  # of each tensor
    aliases: dict[str, str] = field(default_factory=dict)  # further names in the state_dict -> the tensor's name

    @property
    def dynamic(self) -> bool:
        """Does it take batches of any size?"""
        return any(None in shape for shape in self.shapes)


# ---- from a model to its graph


def capture(model: nn.Module, example_input: Any) -> Graph:
    """The graph of a model in evaluation mode; the model is left as it was.

    The batch (the first dimension of the first tensor, and of every other of the same length) may have any size where the
    model allows it; all other sizes are those of the example.

    Args:
        example_input: what the model is called with: a tensor, a tuple of tensors, or a dict of named ones.
    """
    if isinstance(known := getattr(model, "graph", None), Graph):  # it was loaded from a file
        return known
    model = bare(model)
    args, kwargs = as_arguments(example_input)
    for value in (*args, *kwargs.values()):
        if not isinstance(value, Tensor):
            raise GraphError(f"an example input is of type {type(value).__name__}; expected tensors only")
    with undisturbed(model), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch's own, about its own
        program = export(model, args, kwargs)
    return translate(model, program)


def export(model: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Tensor]) -> ExportedProgram:
    """torch.export's program, with its batch of any size if possible, and no operation that writes into its arguments."""
    size = first_tensor((*args, *kwargs.values())).shape[0]

    def doubled(value: Tensor) -> Tensor:  # torch takes a size of 1 for a constant
        return torch.cat([value, value]) if value.ndim > 0 and value.shape[0] == size == 1 else value

    try:
        examples = tuple(map(doubled, args)), {name: doubled(value) for name, value in kwargs.items()}
        shapes = ShapesCollection()
        for value in (*examples[0], *examples[1].values()):
            if value.ndim > 0 and value.shape[0] == max(2, size):
                shapes[value] = {0: Dim.AUTO}
        program = functional(
            torch.export.export(model, *examples, dynamic_shapes=shapes.dynamic_shapes(model, *examples), strict=False)
        )
        if any(None in shape for _, shape, _ in user_inputs(program)):
            return program
    except Exception:  # whatever a model does that a symbolic size does not stand
        pass
    try:
        return functional(torch.export.export(model, args, kwargs, strict=False))
    except Exception as error:
        reason = next(iter(str(error).strip().splitlines()), "")
        raise GraphError(f"torch.export cannot capture this model: {type(error).__name__}: {reason}") from error


IDENTITY = {f"aten.{name}.default" for name in ("alias", "detach", "detach_", "lift_fresh", "lift_fresh_copy")}
DROPOUT = {f"aten.{name}.default" for name in ("dropout", "feature_dropout", "alpha_dropout", "feature_alpha_dropout")}


def is_identity(node: fx.Node) -> bool:
    return str(node.target) in IDENTITY or (str(node.target) in DROPOUT and node.args[2] is False)


INFERENCE_NORM = torch.ops.aten._native_batch_norm_legit_no_training.default  # what torch rewrites batch_norm to


def is_result_of_norm(node: fx.Node) -> bool:
    if node.target is not operator.getitem:
        return False
    source, index = node.args
    return isinstance(source, fx.Node) and source.target is INFERENCE_NORM and isinstance(index, int) and index == 0


def is_copy(node: fx.Node) -> bool:
    """A copy is no other value, where nothing is written in place."""
    return str(node.target) == "aten.clone.default" and not node.kwargs


def functional(program: ExportedProgram) -> ExportedProgram:
    """The program without operations in place: `relu_` of a value that nothing else sees is `relu`; torch rewrites the rest."""
    fresh: set[fx.Node] = set()  # nodes whose memory is their own
    for node in program.graph.nodes:
        if not isinstance(node.target, OpOverload):
            continue
        if is_identity(node):
            if node.args[0] in fresh and len(node.args[0].users) == 1:
                fresh.add(node)
            continue
        schema = node.target._schema
        if schema.is_mutable:
            packet = getattr(torch.ops.aten, schema.name.removeprefix("aten::").removesuffix("_"), None)
            twin = getattr(packet, node.target._overloadname, None)
            source = node.args[0]
            if twin is None or twin._schema.is_mutable or source not in fresh or len(source.users) > 1:
                return program.run_decompositions({})
            node.target = twin
            fresh.add(node)
        elif all(value.alias_info is None for value in schema.returns):
            fresh.add(node)
    return program


def user_inputs(program: ExportedProgram) -> list[tuple[str, tuple[int | None, ...], torch.dtype]]:
    """Name, shape and dtype of every input."""
    found = []
    values = {node.name: node.meta.get("val") for node in program.graph.nodes if node.op == "placeholder"}
    for spec in program.graph_signature.input_specs:
        if spec.kind == InputKind.USER_INPUT:
            value = values[spec.arg.name]
            # A size that torch has found to be fixed is a number in a symbol's clothes.
            shape = tuple(n if isinstance(n, int) else n.node.maybe_as_int() for n in value.shape)
            found.append((spec.arg.name, shape, value.dtype))
    return found


# Whether a view is possible depends on strides, and so on how the value before was computed; a reshape always is.
VIEWS = ("aten.view.default", "aten._unsafe_view.default")


def translate(model: nn.Module, program: ExportedProgram) -> Graph:
    """torch.export's program as ours: tensors under their names in the state_dict, dead and trivial nodes left out."""
    tensors, kinds, aliases = state_of(model)
    inputs = user_inputs(program)
    refs: dict[str, Any] = {}  # torch's name of a value -> our Ref
    for spec in program.graph_signature.input_specs:
        if spec.kind == InputKind.USER_INPUT:
            continue
        if spec.kind not in (InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR):
            raise GraphError(f"the model holds {spec.target!r}, of a kind that cannot be kept as data: {spec.kind.name}")
        name = (spec.target or spec.arg.name).replace("_orig_mod.", "")
        name = aliases.get(name, name)
        if name not in tensors:
            source = program.constants if spec.target in program.constants else program.state_dict
            tensors[name], kinds[name] = source[spec.target].detach().cpu(), "constant"
        refs[spec.arg.name] = Ref(name)

    taken = set(tensors)

    def named(name: str) -> Ref:
        while name in taken:
            name += "_"
        taken.add(name)
        return Ref(name)

    for name, _, _ in inputs:
        refs[name] = named(name)
    nodes = []
    for node in program.graph.nodes:
        if node.op != "call_function":
            continue
        if is_identity(node) or is_copy(node) or is_result_of_norm(node):
            refs[node.name] = refs[node.args[0].name]
        elif node.target is INFERENCE_NORM:
            refs[node.name] = named(node.name)
            *args, momentum, eps = translated(tuple(node.args), refs)
            nodes.append(Node(refs[node.name].name, "aten.batch_norm.default", (*args, False, momentum, eps, False)))
        else:
            refs[node.name] = named(node.name)
            args, kwargs = translated(tuple(node.args), refs), translated(dict(node.kwargs), refs)
            op = name_of(node.target)
            nodes.append(Node(refs[node.name].name, "aten.reshape.default" if op in VIEWS else op, args, kwargs))
    outputs = translated_outputs(program, refs)
    names = [refs[name].name for name, _, _ in inputs]
    shapes, dtypes = [shape for _, shape, _ in inputs], [dtype for _, _, dtype in inputs]
    return Graph(names, shapes, dtypes, living(nodes, outputs), outputs, tensors, kinds, aliases)


def state_of(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, Kind], dict[str, str]]:
    """The state_dict with every tensor once: tensors, their kinds, and the further names of those that are shared."""
    tensors: dict[str, Tensor] = {}
    kinds: dict[str, Kind] = {}
    aliases: dict[str, str] = {}
    first: dict[int, str] = {}
    for full, value in model.state_dict(keep_vars=True).items():
        name = full.replace("_orig_mod.", "")
        if not isinstance(value, Tensor):
            raise GraphError(f"the model's state_dict has {name!r} of type {type(value).__name__}; expected tensors only")
        if id(value) in first:
            aliases[name] = first[id(value)]
            continue
        first[id(value)] = name
        tensors[name], kinds[name] = value.detach().cpu(), "parameter" if isinstance(value, nn.Parameter) else "buffer"
    return tensors, kinds, aliases


def name_of(target: Any) -> str:
    if isinstance(target, OpOverload):
        return str(target)
    module, name = getattr(target, "__module__", ""), getattr(target, "__name__", str(target))
    if f"{module.removeprefix('_')}.{name}" in PLAIN:
        return f"{module.removeprefix('_')}.{name}"
    raise GraphError(f"the model uses {name}, which is no operation on tensors and sizes (control flow that depends on data?)")


def translated(value: Any, refs: dict[str, Any]) -> Any:
    """An argument with torch's nodes as our Refs. All tensors are on the CPU."""
    if isinstance(value, fx.Node):
        if value.name not in refs:
            raise GraphError(f"the model uses a part of itself as a value: {value.target}")
        return refs[value.name]
    if isinstance(value, (list, tuple)):
        items = [translated(v, refs) for v in value]
        return tuple(items) if isinstance(value, tuple) else items
    if isinstance(value, dict):
        return {k: translated(v, refs) for k, v in value.items() if k not in ("device", "pin_memory", "layout")}
    return torch.device("cpu") if isinstance(value, torch.device) else value


def translated_outputs(program: ExportedProgram, refs: dict[str, Any]) -> Any:
    for spec in program.graph_signature.output_specs:
        if spec.kind != OutputKind.USER_OUTPUT:
            raise GraphError(f"the model changes {spec.target!r} while it runs, in evaluation mode too ({spec.kind.name})")
    arguments = [spec.arg for spec in program.graph_signature.output_specs]
    flat = [refs[arg.name] if getattr(arg, "name", None) in refs else constant(arg) for arg in arguments]
    outputs = pytree.tree_unflatten(flat, program.call_spec.out_spec)
    check_outputs(outputs)
    return outputs


def constant(argument: Any) -> Any:
    if isinstance(argument, TensorArgument) or not hasattr(argument, "value"):
        raise GraphError(f"the model returns {argument}, which is not a value that it computes")
    return argument.value


def check_outputs(value: Any) -> None:
    if type(value) in (list, tuple):
        for item in value:
            check_outputs(item)
    elif type(value) is dict and all(isinstance(key, str) for key in value):
        for item in value.values():
            check_outputs(item)
    elif not isinstance(value, (Ref, int, float, str, bool, type(None))):
        raise GraphError(f"the model returns a {type(value).__name__}; expected tensors, tuples, lists or dicts of them")


def living(nodes: Sequence[Node], outputs: Any) -> list[Node]:
    """The nodes that the outputs depend on. Checks of sizes, which torch leaves in a program, are dead."""
    needed, kept = set(refs_in(outputs)), []
    for node in reversed(nodes):
        if node.name in needed:
            needed.update(refs_in((node.args, node.kwargs)))
            kept.append(node)
    return kept[::-1]


def refs_in(value: Any) -> Iterator[str]:
    """The names that an argument refers to."""
    if isinstance(value, Ref):
        yield value.name
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from refs_in(item)
    elif isinstance(value, dict):
        yield from refs_in(list(value.values()))


# ---- running a graph


def run(graph: Graph, *inputs: Tensor, tensors: dict[str, Tensor] | None = None) -> Any:
    """What the model returns for these inputs, each operation being torch's own.

    Args:
        tensors: to use in place of the graph's.
    """
    check_inputs(graph, inputs)
    return execute(graph, inputs, graph.tensors if tensors is None else tensors)


def check_inputs(graph: Graph, inputs: Sequence[Tensor]) -> None:
    if len(inputs) != len(graph.inputs):
        raise GraphError(f"there are {len(inputs)} inputs; expected {len(graph.inputs)}: {', '.join(graph.inputs)}")
    for name, value, shape in zip(graph.inputs, inputs, graph.shapes):
        if len(value.shape) != len(shape) or any(n not in (None, m) for n, m in zip(shape, value.shape)):
            wanted = "×".join("any" if n is None else str(n) for n in shape)
            raise GraphError(f"the input {name} is {'×'.join(map(str, value.shape))}; expected {wanted}")


def execute(
    graph: Graph,
    inputs: Sequence[Tensor],
    tensors: dict[str, Tensor],
    see: Callable[[Node, Any], None] = lambda node, value: None,
    over: dict[str, list[str]] | None = None,
) -> Any:
    """Run the nodes on the inputs' device, forgetting each value after its last use. `see` is shown every one as it is made.

    Args:
        over: what `last_uses` says of the graph, where it is known already.
    """
    values: dict[str, Any] = {**tensors, **dict(zip(graph.inputs, inputs)), DEVICE: inputs[0].device}
    over = last_uses(graph) if over is None else over
    for node in graph.nodes:
        try:
            named = filled(node.kwargs, values) if node.kwargs else {}
            if node.op in CREATING:
                named["device"] = values[DEVICE]
            args = filled(node.args, values)
            if node.op in SPLITTING and max(args[0].shape, default=0) > WINDOW:
                raise ValueError(f"of a tensor of {tuple(args[0].shape)} it would make too many")
            value = resolve(node.op)(*args, **named)
        except Exception as error:  # whatever torch raises for such arguments
            reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
            raise GraphError(f"node {node.name} ({node.op}) failed: {reason}") from error
        values[node.name] = value
        see(node, value)
        for name in over.get(node.name, ()):
            del values[name]
    return filled(graph.outputs, values)


def last_uses(graph: Graph) -> dict[str, list[str]]:
    """The values that nothing needs after a node, by the node's name."""
    last = {name: node.name for node in graph.nodes for name in refs_in((node.args, node.kwargs))}
    over: dict[str, list[str]] = {}
    kept = set(refs_in(graph.outputs))
    for name, node_name in last.items():
        if name not in kept:
            over.setdefault(node_name, []).append(name)
    return over


DEVICE = ""  # no value has this name


def overloads(*names: str) -> frozenset[str]:
    return frozenset(f"aten.{name}.{overload}" for name in names for overload in getattr(torch.ops.aten, name).overloads())


CREATING = overloads("arange", "eye", "full", "ones", "scalar_tensor", "zeros")  # operations that make tensors of no tensor
SPLITTING = overloads("chunk", "split", "split_with_sizes", "unbind", "unsafe_chunk", "unsafe_split")  # many tensors of one


def filled(value: Any, values: dict[str, Any]) -> Any:
    """An argument with every Ref replaced by its value."""
    kind = type(value)
    if kind is Ref:
        return values[value.name]
    if kind is tuple:
        return tuple([filled(v, values) for v in value])
    if kind is list:
        return [filled(v, values) for v in value]
    if kind is dict:
        return {k: filled(v, values) for k, v in value.items()}
    return values.get(DEVICE, value) if kind is torch.device else value


def dry_run(graph: Graph, batch: int = 1) -> dict[str, Any]:
    """What every node would compute for a batch of that size, as tensors of torch's meta device: shapes without memory."""
    found: dict[str, Any] = {}
    shapes = [tuple(batch if n is None else n for n in shape) for shape in graph.shapes]
    inputs = [torch.empty(shape, dtype=dtype, device="meta") for shape, dtype in zip(shapes, graph.dtypes)]
    tensors = {name: tensor.to("meta") for name, tensor in graph.tensors.items()}
    with torch.no_grad():
        execute(graph, inputs, tensors, lambda node, value: found.update({node.name: value}))
    return found


# ---- the operations


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
    if outer == "List":
        return (
            all(fits(v, inner) for v in value) if isinstance(value, (list, tuple)) else inner != "Tensor" and fits(value, inner)
        )
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


# ---- as plain data


DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.complex128),
        *(torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.bool),
        *(torch.float8_e4m3fn, torch.float8_e5m2),
    )
}
FORMATS = {str(f).removeprefix("torch."): f for f in (torch.contiguous_format, torch.channels_last, torch.preserve_format)}
LARGEST = 2**63 - 1


def to_json(graph: Graph) -> dict[str, Any]:
    """The graph without its tensors' values, as what JSON can hold. Refuses operations that a file may not use."""
    for node in graph.nodes:
        if not is_pure(node.op):
            raise GraphError(f"the model uses {node.op} (node {node.name}), which a packed file cannot hold")
    shapes, dtypes = [list(shape) for shape in graph.shapes], [str(d).removeprefix("torch.") for d in graph.dtypes]
    return {
        "inputs": [list(entry) for entry in zip(graph.inputs, dtypes, shapes)],
        "nodes": [[n.name, n.op, encode(list(n.args)), {k: encode(v) for k, v in n.kwargs.items()}] for n in graph.nodes],
        "outputs": encode(graph.outputs),
        "kinds": dict(graph.kinds),
        "aliases": dict(graph.aliases),
    }


def encode(value: Any) -> Any:
    if isinstance(value, Ref):
        return {"ref": value.name}
    if isinstance(value, list):
        return [encode(v) for v in value]
    if isinstance(value, tuple):
        return {"tuple": [encode(v) for v in value]}
    if isinstance(value, dict):
        return {"dict": {k: encode(v) for k, v in value.items()}}
    if isinstance(value, torch.dtype) and str(value).removeprefix("torch.") in DTYPES:
        return {"dtype": str(value).removeprefix("torch.")}
    if isinstance(value, torch.memory_format) and str(value).removeprefix("torch.") in FORMATS:
        return {"format": str(value).removeprefix("torch.")}
    if isinstance(value, torch.device):
        return {"device": "cpu"}
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": str(value)}
    if value is None or type(value) in (bool, int, float, str):
        return value
    raise GraphError(f"the model uses a value of type {type(value).__name__}, which a packed file cannot hold")


def decode(value: Any) -> Any:
    """The inverse of `encode`, which believes nothing."""
    if value is None or type(value) in (bool, str):
        return value
    if type(value) is int:
        require(-LARGEST - 1 <= value <= LARGEST, "a number is out of range")
        return value
    if type(value) is float:
        require(math.isfinite(value), "a number is not finite")
        return value
    if type(value) is list:
        return [decode(v) for v in value]
    require(type(value) is dict and len(value) == 1, "an argument is not of a known form")
    ((tag, inner),) = value.items()
    if tag == "tuple" and type(inner) is list:
        return tuple(decode(v) for v in inner)
    if tag == "dict" and type(inner) is dict:
        return {k: decode(v) for k, v in inner.items()}
    require(type(inner) is str, f"an argument's {tag!r} is not of a known form")
    if tag == "ref":
        return Ref(inner)
    choices: dict[str, dict[str, Any]] = {
        "dtype": DTYPES,
        "format": FORMATS,
        "device": {"cpu": torch.device("cpu")},
        "float": {text: float(text) for text in ("inf", "-inf", "nan")},
    }
    require(tag in choices and inner in choices[tag], f"an argument's {tag!r} is {inner!r}, which is unknown")
    return choices[tag][inner]


def require(fine: bool, problem: str) -> None:
    if not fine:
        raise GraphError(problem)


def from_json(data: Any, tensors: dict[str, Tensor]) -> Graph:
    """A graph from `to_json`'s data and its tensors. Whatever is not as `to_json` writes it is refused."""
    fields = ("inputs", "nodes", "outputs", "kinds", "aliases")
    require(type(data) is dict and sorted(data) == sorted(fields), f"a graph has the fields {', '.join(fields)} and no other")
    kinds, aliases = data["kinds"], data["aliases"]
    require(type(kinds) is dict and set(kinds) == set(tensors), "the graph's kinds are not those of its tensors")
    require(all(kind in KINDS for kind in kinds.values()), f"a tensor's kind is not one of {', '.join(KINDS)}")
    require(
        type(aliases) is dict and all(type(a) is str and kinds.get(a, "constant") != "constant" for a in aliases.values()),
        "an alias is not that of a parameter or buffer",
    )
    for name in (*tensors, *aliases):
        require(name.isprintable() and all(name.split(".")), f"a tensor has the name {name!r}, which no module gives")
    require(not set(aliases) & set(tensors), "an alias has the name of a tensor")
    known = set(tensors)

    def new(name: Any) -> str:
        require(type(name) is str and name != DEVICE and name.isprintable(), f"the name {name!r} is none")
        require(name not in known and name not in aliases, f"the name {name!r} is used twice")
        known.add(name)
        return name

    inputs, shapes, dtypes = [], [], []
    require(type(data["inputs"]) is list and len(data["inputs"]) > 0, "the graph has no inputs")
    for entry in data["inputs"]:
        require(type(entry) is list and len(entry) == 3, "an input is not a name, a dtype and a shape")
        name, dtype, shape = entry
        inputs.append(new(name))
        require(type(dtype) is str and dtype in DTYPES, f"the input {name} has an unknown dtype")
        sizes = type(shape) is list and all(n is None or (type(n) is int and 0 <= n <= LARGEST) for n in shape)
        require(sizes, f"the input {name} has a shape that is none")
        shapes.append(tuple(shape))
        dtypes.append(DTYPES[dtype])
    nodes = []
    require(type(data["nodes"]) is list, "the graph's nodes are not a list")
    for entry in data["nodes"]:
        require(type(entry) is list and len(entry) == 4, "a node is not a name, an operation, arguments and named ones")
        name, op, args, kwargs = entry
        require(type(op) is str and is_pure(op), f"the node {name!r} asks for {op!r}, which no file may use")
        require(type(args) is list and type(kwargs) is dict, f"the arguments of the node {name!r} are not of a known form")
        node = Node(name, op, tuple(decode(args)), {k: decode(v) for k, v in kwargs.items()})
        check_arguments(node)
        for used in refs_in((node.args, node.kwargs)):
            require(used in known, f"the node {name!r} uses {used!r} before it is there")
        nodes.append(node)
        new(name)
    outputs = decode(data["outputs"])
    check_outputs(outputs)
    returned = set(refs_in(outputs))
    require(bool(returned) and returned <= known, "the outputs are not values of the graph")
    return Graph(inputs, shapes, dtypes, nodes, outputs, dict(tensors), kinds, aliases)
