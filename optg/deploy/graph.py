"""A model as data: its operations in order and its tensors by name, captured with torch.export.

A packed file stores this graph, the engine lowers it, and `run` interprets it with torch's own operations. A graph that came
from a file holds none but the operations of `PURE`: they compute values from values, and can reach nothing else.
"""

import inspect
import operator
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, fx, nn
from torch._ops import OpOverload
from torch.export import Dim, ExportedProgram, ShapesCollection
from torch.export.graph_signature import InputKind, OutputKind, TensorArgument
from torch.utils import _pytree as pytree

from optg.core.accounting import as_arguments, first_tensor
from optg.core.preserve import evaluating
from optg.core.prunable import unwrap
from optg.deploy.operations import CREATING, PLAIN, SPLITTING, WINDOW, GraphError, Node, Ref, refs_in, resolve
from optg.deploy.shapes import shape_of

Kind = Literal["parameter", "buffer", "constant"]  # a constant is not in the state_dict
KINDS: tuple[Kind, ...] = ("parameter", "buffer", "constant")


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
    model = unwrap(model)
    args, kwargs = as_arguments(example_input)
    order = list(inspect.signature(model.forward).parameters)
    kwargs = dict(sorted(kwargs.items(), key=lambda item: order.index(item[0]) if item[0] in order else len(order)))
    for value in (*args, *kwargs.values()):
        if not isinstance(value, Tensor):
            raise GraphError(f"an example input is of type {type(value).__name__}; expected tensors only")
    with evaluating(model), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch's own, about its own
        if (program := export_any_batch(model, args, kwargs)) is not None:
            graph = translate(model, program)
            if holds_for_one(graph, model, args, kwargs):
                return graph
        return translate(model, export(model, args, kwargs))


def holds_for_one(graph: Graph, model: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Tensor]) -> bool:
    """Does a graph of any batch do with one example what the model does? torch takes it that the batch is larger."""
    one = [value[:1] if None in shape else value for value, shape in zip((*args, *kwargs.values()), graph.shapes)]
    with torch.no_grad():
        try:
            expected = model.eval()(*one[: len(args)], **dict(zip(kwargs, one[len(args) :])))
        except Exception:
            return True  # then nobody will ask for it
        found = run(graph, *(value.cpu() for value in one))
    return all(map(alike, pytree.tree_leaves(found), pytree.tree_leaves(expected)))


def alike(a: Any, b: Any) -> bool:
    """The same but for rounding, on whatever device and in whatever type."""
    if not isinstance(a, Tensor) or not isinstance(b, Tensor):
        return type(a) is type(b)
    a, b = a.double().cpu().nan_to_num(), b.double().cpu().nan_to_num()
    return a.shape == b.shape and bool(((a - b).abs() <= 0.05 * b.abs().amax() if b.numel() else a == b).all())


def export(model: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Tensor]) -> ExportedProgram:
    """torch.export's program for these sizes, with no operation that writes into its arguments."""
    try:
        return functional(torch.export.export(model, args, kwargs, strict=False))
    except Exception as error:
        reason = next(iter(str(error).strip().splitlines()), "")
        raise GraphError(f"torch.export cannot capture this model: {type(error).__name__}: {reason}") from error


def export_any_batch(model: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Tensor]) -> ExportedProgram | None:
    """The same for a batch of any size; None where a model does not stand that, or treats some batches otherwise."""
    size = first_tensor((*args, *kwargs.values())).shape[0]

    def doubled(value: Tensor) -> Tensor:  # torch takes a size of 1 for a constant
        return torch.cat([value, value]) if value.ndim > 0 and value.shape[0] == size == 1 else value

    examples = tuple(map(doubled, args)), {name: doubled(value) for name, value in kwargs.items()}
    shapes = ShapesCollection()
    for value in (*examples[0], *examples[1].values()):
        if value.ndim > 0 and value.shape[0] == max(2, size):
            shapes[value] = {0: Dim.AUTO}
    try:
        program = functional(
            torch.export.export(model, *examples, dynamic_shapes=shapes.dynamic_shapes(model, *examples), strict=False)
        )
    except Exception:  # whatever a model does
        return None
    every = all(limits.lower <= 2 and limits.upper > LARGE for limits in program.range_constraints.values())
    return program if every and any(None in shape for _, shape, _ in user_inputs(program)) else None


LARGE = 2**31  # a batch of that size is not among those that a model does something else with

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


# ---- running a graph


def run(graph: Graph, *inputs: Tensor, tensors: dict[str, Tensor] | None = None) -> Any:
    """What the model returns for these inputs, each operation being torch's own.

    Args:
        tensors: to use in place of the graph's.
    """
    check_inputs(graph, inputs)
    return execute(graph, inputs, graph.tensors if tensors is None else tensors)


def in_order(graph: Graph, inputs: tuple[Tensor, ...], named: dict[str, Tensor]) -> tuple[Tensor, ...]:
    """All inputs of a call, those given by name after the others."""
    if unknown := named.keys() - set(graph.inputs[len(inputs) :]):
        raise ValueError(f"unknown input {min(unknown)}; expected {', '.join(graph.inputs)}")
    return (*inputs, *(named[name] for name in graph.inputs[len(inputs) :] if name in named))


def check_inputs(graph: Graph, inputs: Sequence[Tensor]) -> int:
    """Refuse what does not fit. Returns the size of the batch."""
    if len(inputs) != len(graph.inputs):
        raise GraphError(f"there are {len(inputs)} inputs; expected {len(graph.inputs)}: {', '.join(graph.inputs)}")
    for name, value, shape in zip(graph.inputs, inputs, graph.shapes):
        if not isinstance(value, Tensor):
            raise GraphError(f"the input {name} is of type {type(value).__name__}; expected a tensor")
        if len(value.shape) != len(shape) or any(n not in (None, m) for n, m in zip(shape, value.shape)):
            wanted = "×".join("any" if n is None else str(n) for n in shape)
            raise GraphError(f"the input {name} is {'×'.join(map(str, value.shape))}; expected {wanted}")
    batches = [m for v, shape in zip(inputs, graph.shapes) for n, m in zip(shape, v.shape) if n is None]
    if any(m != batches[0] for m in batches[1:]):  # no set of them: in one the symbol of an export would become a number
        sizes = " and ".join(map(str, sorted(set(batches))))
        raise GraphError(f"the inputs have batches of {sizes}; expected one size for all")
    return batches[0] if batches else next((shape[0] or 0 for shape in graph.shapes if shape), 1)


def execute(
    graph: Graph,
    inputs: Sequence[Tensor],
    tensors: dict[str, Tensor],
    see: Callable[[Node, Any], None] = lambda node, value: None,
    over: dict[str, list[str]] | None = None,
    compute: Callable[[str, Any, dict[str, Any]], Any] = lambda op, args, named: resolve(op)(*args, **named),
) -> Any:
    """Run the nodes on the inputs' device, forgetting each value after its last use. `see` is shown every one as it is made.

    Args:
        over: what `last_uses` says of the graph, where it is known already.
        compute: what an operation gives, of its arguments.
    """
    values: dict[str, Any] = {**tensors, **dict(zip(graph.inputs, inputs)), DEVICE: inputs[0].device}
    over = last_uses(graph) if over is None else over
    for node in graph.nodes:
        try:
            named = filled(node.kwargs, values) if node.kwargs else {}
            if node.op in CREATING:
                named["device"] = values[DEVICE]
            args = filled(node.args, values)
            if node.op in SPLITTING and pieces(node.op, args, named) > WINDOW:
                raise ValueError(f"of a tensor of {tuple(args[0].shape)} it would make too many")
            value = compute(node.op, args, named)
        except Exception as error:  # whatever torch raises for such arguments
            reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
            raise GraphError(f"node {node.name} ({node.op}) failed: {reason}") from error
        values[node.name] = value
        see(node, value)
        for name in over.get(node.name, ()):
            del values[name]
    return filled(graph.outputs, values)


def pieces(op: str, args: Sequence[Any], named: dict[str, Any]) -> int:
    """How many tensors a splitting of one makes, at most."""
    tensor, how, dim = [*args, 0, 0][:3]
    if "chunk" in op:
        return int(named.get("chunks", how))
    if isinstance(how, (list, tuple)):
        return len(how)
    return int(tensor.shape[named.get("dim", how if "unbind" in op else dim)])


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

    def compute(op: str, args: Any, named: dict[str, Any]) -> Any:
        known = shape_of(op, args, named)
        return resolve(op)(*args, **named) if known is None else known

    with torch.no_grad():
        execute(graph, inputs, tensors, lambda node, value: found.update({node.name: value}), compute=compute)
    return found
