"""Translate an exported program of torch into a Graph."""

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch._ops import OpOverload
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind, TensorArgument
from torch.utils import _pytree as pytree

from optg.deploy.graph.nodes import Graph, GraphError, Node, Ref, TensorKind, check_outputs, refs_in
from optg.deploy.graph.operations import PYTHON_FUNCTIONS

IDENTITY_OPS = {f"aten.{name}.default" for name in ("alias", "detach", "detach_", "lift_fresh", "lift_fresh_copy")}
DROPOUT_OPS = {f"aten.{name}.default" for name in ("dropout", "feature_dropout", "alpha_dropout", "feature_alpha_dropout")}
# Whether a view is possible depends on strides, and so on how its input was computed. A reshape is always possible.
VIEW_OPS = ("aten.view.default", "aten._unsafe_view.default")
INFERENCE_NORM = torch.ops.aten._native_batch_norm_legit_no_training.default  # torch decomposes batch_norm into this


class InputSpec(NamedTuple):
    name: str
    shape: tuple[int | None, ...]
    dtype: torch.dtype


@dataclass
class Trace:
    """The operations of a model, as torch records them."""

    graph: fx.Graph
    inputs: list[InputSpec]
    tensors: dict[str, tuple[str, Tensor]]  # the name of a value -> its name in the model, and the tensor
    outputs: Any  # Refs to values, and plain values, in lists, tuples and dicts


def trace_of(program: ExportedProgram) -> Trace:
    """Return the operations of an exported program."""
    tensors: dict[str, tuple[str, Tensor]] = {}
    for spec in program.graph_signature.input_specs:
        if spec.kind == InputKind.USER_INPUT:
            continue
        if spec.kind not in (InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR):
            raise GraphError(f"the model holds {spec.target!r}, which is a {spec.kind.name}; expected parameters and buffers")
        source = program.constants if spec.target in program.constants else program.state_dict
        tensors[spec.arg.name] = spec.target or spec.arg.name, source[spec.target]
    return Trace(program.graph, input_specs(program), tensors, outputs_of(program))


def translate(model: nn.Module, trace: Trace) -> Graph:
    """Return the trace as a Graph: tensors under their state_dict names, without dead and trivial nodes."""
    tensors, kinds, aliases = collect_state(model)
    refs: dict[str, Any] = {}  # torch's name of a value -> Ref
    for node_name, (full_name, value) in trace.tensors.items():
        name = full_name.replace("_orig_mod.", "")
        name = aliases.get(name, name)
        if name not in tensors:
            tensors[name], kinds[name] = value.detach().cpu(), "constant"
        refs[node_name] = Ref(name)

    taken = set(tensors)

    def unique_ref(name: str) -> Ref:
        while name in taken:
            name += "_"
        taken.add(name)
        return Ref(name)

    for name, _, _ in trace.inputs:
        refs[name] = unique_ref(name)
    nodes = []
    for node in trace.graph.nodes:
        if node.op != "call_function":
            continue
        if is_identity(node) or is_plain_clone(node) or is_norm_output(node):
            refs[node.name] = refs[node.args[0].name]
        elif node.target is INFERENCE_NORM:
            refs[node.name] = unique_ref(node.name)
            *args, momentum, eps = translate_argument(tuple(node.args), refs)
            nodes.append(Node(refs[node.name].name, "aten.batch_norm.default", (*args, False, momentum, eps, False)))
        else:
            refs[node.name] = unique_ref(node.name)
            args, kwargs = translate_argument(tuple(node.args), refs), translate_argument(dict(node.kwargs), refs)
            op = op_name(node.target)
            nodes.append(Node(refs[node.name].name, "aten.reshape.default" if op in VIEW_OPS else op, args, kwargs))
    outputs = pytree.tree_map_only(Ref, lambda ref: refs[ref.name], trace.outputs)
    check_outputs(outputs)
    names = [refs[name].name for name, _, _ in trace.inputs]
    shapes, dtypes = [spec.shape for spec in trace.inputs], [spec.dtype for spec in trace.inputs]
    return Graph(names, shapes, dtypes, remove_dead_nodes(nodes, outputs), outputs, tensors, kinds, aliases)


def collect_state(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, TensorKind], dict[str, str]]:
    """Return the state_dict's tensors, each once, their kinds, and the other names of shared tensors."""
    tensors: dict[str, Tensor] = {}
    kinds: dict[str, TensorKind] = {}
    aliases: dict[str, str] = {}
    first_names: dict[int, str] = {}
    for full_name, value in model.state_dict(keep_vars=True).items():
        name = full_name.replace("_orig_mod.", "")
        if not isinstance(value, Tensor):
            raise GraphError(f"the model's state_dict has {name!r} of type {type(value).__name__}; expected tensors only")
        if id(value) in first_names:
            aliases[name] = first_names[id(value)]
            continue
        first_names[id(value)] = name
        tensors[name], kinds[name] = value.detach().cpu(), "parameter" if isinstance(value, nn.Parameter) else "buffer"
    return tensors, kinds, aliases


def input_specs(program: ExportedProgram) -> list[InputSpec]:
    """Return name, shape and dtype of every user input."""
    found = []
    values = {node.name: node.meta.get("val") for node in program.graph.nodes if node.op == "placeholder"}
    for spec in program.graph_signature.input_specs:
        if spec.kind == InputKind.USER_INPUT:
            value = values[spec.arg.name]
            # torch may keep a symbol for a size that it has found to be constant.
            shape = tuple(n if isinstance(n, int) else n.node.maybe_as_int() for n in value.shape)
            found.append(InputSpec(spec.arg.name, shape, value.dtype))
    return found


def op_name(target: Any) -> str:
    if isinstance(target, OpOverload):
        return str(target)
    module, name = getattr(target, "__module__", ""), getattr(target, "__name__", str(target))
    if f"{module.removeprefix('_')}.{name}" in PYTHON_FUNCTIONS:
        return f"{module.removeprefix('_')}.{name}"
    raise GraphError(f"the model uses {name}, which is not an operation on tensors or sizes (data-dependent control flow?)")


def translate_argument(value: Any, refs: dict[str, Any]) -> Any:
    """Return an argument with torch's nodes replaced by Refs and every device by the CPU."""
    if isinstance(value, fx.Node):
        if value.name not in refs:
            raise GraphError(f"the model uses a submodule as a value: {value.target}")
        return refs[value.name]
    if isinstance(value, (list, tuple)):
        items = [translate_argument(v, refs) for v in value]
        return tuple(items) if isinstance(value, tuple) else items
    if isinstance(value, dict):
        return {k: translate_argument(v, refs) for k, v in value.items() if k not in ("device", "pin_memory", "layout")}
    return torch.device("cpu") if isinstance(value, torch.device) else value


def outputs_of(program: ExportedProgram) -> Any:
    """Return the outputs, with a Ref for every value that the program computes."""
    known = {node.name for node in program.graph.nodes if node.op in ("placeholder", "call_function")}
    for spec in program.graph_signature.output_specs:
        if spec.kind != OutputKind.USER_OUTPUT:
            raise GraphError(
                f"the model modifies {spec.target!r} in its forward pass, even in evaluation mode ({spec.kind.name})"
            )
    arguments = [spec.arg for spec in program.graph_signature.output_specs]
    flat = [Ref(arg.name) if getattr(arg, "name", None) in known else constant_output(arg) for arg in arguments]
    return pytree.tree_unflatten(flat, program.call_spec.out_spec)


def constant_output(argument: Any) -> Any:
    if isinstance(argument, TensorArgument) or not hasattr(argument, "value"):
        raise GraphError(f"the model returns {argument}, which none of its operations computes")
    return argument.value


def remove_dead_nodes(nodes: Sequence[Node], outputs: Any) -> list[Node]:
    """Return the nodes that the outputs depend on. This also drops the size checks that torch leaves in a program."""
    needed, kept = set(refs_in(outputs)), []
    for node in reversed(nodes):
        if node.name in needed:
            needed.update(refs_in((node.args, node.kwargs)))
            kept.append(node)
    return kept[::-1]


def remove_inplace_ops(program: ExportedProgram) -> ExportedProgram:
    """Replace `relu_` and the like by `relu` where nothing else sees the value. Let torch decompose the others."""
    return program if replace_inplace_ops(program.graph) else program.run_decompositions({})


def replace_inplace_ops(graph: fx.Graph) -> bool:
    """Replace `relu_` and the like by `relu` where nothing else sees the value. Return whether none is left."""
    fresh: set[fx.Node] = set()  # nodes whose result owns its memory
    for node in graph.nodes:
        if not isinstance(node.target, OpOverload):
            continue
        if is_identity(node):
            if node.args[0] in fresh and len(node.args[0].users) == 1:
                fresh.add(node)
            continue
        schema = node.target._schema
        if schema.is_mutable:
            packet = getattr(torch.ops.aten, schema.name.removeprefix("aten::").removesuffix("_"), None)
            out_of_place = getattr(packet, node.target._overloadname, None)
            source = node.args[0]
            if out_of_place is None or out_of_place._schema.is_mutable or source not in fresh or len(source.users) > 1:
                return False
            node.target = out_of_place
            fresh.add(node)
        elif all(value.alias_info is None for value in schema.returns):
            fresh.add(node)
    return True


def is_identity(node: fx.Node) -> bool:
    return str(node.target) in IDENTITY_OPS or (str(node.target) in DROPOUT_OPS and node.args[2] is False)


def is_plain_clone(node: fx.Node) -> bool:
    """Return whether the node only copies: without in-place operations a copy equals its source."""
    return str(node.target) == "aten.clone.default" and not node.kwargs


def is_norm_output(node: fx.Node) -> bool:
    """Return whether the node picks the output of INFERENCE_NORM, which returns statistics too."""
    if node.target is not operator.getitem:
        return False
    source, index = node.args
    return isinstance(source, fx.Node) and source.target is INFERENCE_NORM and isinstance(index, int) and index == 0
