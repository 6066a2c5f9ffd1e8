"""Run a graph with torch's own operations, or dry-run it on the meta device to learn every shape."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from optg.deploy.graph.arguments import LARGEST_WINDOW
from optg.deploy.graph.nodes import Graph, GraphError, Node, Ref, refs_in
from optg.deploy.graph.operations import CREATION_OPS, SPLITTING_OPS, resolve
from optg.deploy.graph.shapes import shape_of

DEVICE = ""  # key of the device among the values; no value may have this name


def run_graph(graph: Graph, *inputs: Tensor, tensors: dict[str, Tensor] | None = None) -> Any:
    """Return the model's outputs for these inputs.

    Args:
        tensors: replace the graph's own tensors.
    """
    check_inputs(graph, inputs)
    return execute(graph, inputs, graph.tensors if tensors is None else tensors)


def order_inputs(graph: Graph, inputs: tuple[Tensor, ...], named: dict[str, Tensor]) -> tuple[Tensor, ...]:
    """Return positional and named inputs of a call in the graph's order."""
    if unknown := named.keys() - set(graph.inputs[len(inputs) :]):
        raise ValueError(f"unknown input {min(unknown)}; expected {', '.join(graph.inputs)}")
    return (*inputs, *(named[name] for name in graph.inputs[len(inputs) :] if name in named))


def check_inputs(graph: Graph, inputs: Sequence[Tensor]) -> int:
    """Raise GraphError unless the inputs have the graph's shapes. Return the batch size."""
    if len(inputs) != len(graph.inputs):
        raise GraphError(f"got {len(inputs)} inputs; expected {len(graph.inputs)}: {', '.join(graph.inputs)}")
    for name, value, shape in zip(graph.inputs, inputs, graph.shapes):
        if not isinstance(value, Tensor):
            raise GraphError(f"the input {name} is of type {type(value).__name__}; expected a tensor")
        if len(value.shape) != len(shape) or any(n not in (None, m) for n, m in zip(shape, value.shape)):
            expected = "×".join("any" if n is None else str(n) for n in shape)
            raise GraphError(f"the input {name} is {'×'.join(map(str, value.shape))}; expected {expected}")
    batches = [m for v, shape in zip(inputs, graph.shapes) for n, m in zip(shape, v.shape) if n is None]
    if any(m != batches[0] for m in batches[1:]):  # not a set: during an export, that would make the symbolic size a constant
        sizes = " and ".join(map(str, sorted(set(batches))))
        raise GraphError(f"the inputs have batches of {sizes}; expected one size for all")
    return batches[0] if batches else next((shape[0] or 0 for shape in graph.shapes if shape), 1)


def execute(
    graph: Graph,
    inputs: Sequence[Tensor],
    tensors: dict[str, Tensor],
    on_value: Callable[[Node, Any], None] = lambda node, value: None,
    freed: dict[str, list[str]] | None = None,
    compute: Callable[[str, Any, dict[str, Any]], Any] = lambda op, args, named: resolve(op)(*args, **named),
) -> Any:
    """Run the nodes on the inputs' device and free each value after its last use.

    Args:
        on_value: called with every node and its result.
        freed: the result of `freed_after(graph)`, to avoid computing it again.
        compute: computes an operation from its arguments.
    """
    values: dict[str, Any] = {**tensors, **dict(zip(graph.inputs, inputs)), DEVICE: inputs[0].device}
    freed = freed_after(graph) if freed is None else freed
    for node in graph.nodes:
        try:
            named = fill_refs(node.kwargs, values) if node.kwargs else {}
            if node.op in CREATION_OPS:
                named["device"] = values[DEVICE]
            args = fill_refs(node.args, values)
            if node.op in SPLITTING_OPS and count_pieces(node.op, args, named) > LARGEST_WINDOW:
                raise ValueError(f"splits a tensor of {tuple(args[0].shape)} into more than {LARGEST_WINDOW} pieces")
            value = compute(node.op, args, named)
        except Exception as error:  # torch raises many types for wrong arguments
            reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
            raise GraphError(f"node {node.name} ({node.op}) failed: {reason}") from error
        values[node.name] = value
        on_value(node, value)
        for name in freed.get(node.name, ()):
            del values[name]
    return fill_refs(graph.outputs, values)


def count_pieces(op: str, args: Sequence[Any], named: dict[str, Any]) -> int:
    """Return an upper bound on the number of tensors that a split produces."""
    tensor, how, dim = [*args, 0, 0][:3]
    if "chunk" in op:
        return int(named.get("chunks", how))
    if isinstance(how, (list, tuple)):
        return len(how)
    return int(tensor.shape[named.get("dim", how if "unbind" in op else dim)])


def freed_after(graph: Graph) -> dict[str, list[str]]:
    """Map each node's name to the values that no later node needs."""
    last_user = {name: node.name for node in graph.nodes for name in refs_in((node.args, node.kwargs))}
    freed: dict[str, list[str]] = {}
    returned = set(refs_in(graph.outputs))
    for name, node_name in last_user.items():
        if name not in returned:
            freed.setdefault(node_name, []).append(name)
    return freed


def fill_refs(value: Any, values: dict[str, Any]) -> Any:
    """Return an argument with every Ref replaced by its value."""
    kind = type(value)
    if kind is Ref:
        return values[value.name]
    if kind is tuple:
        return tuple([fill_refs(v, values) for v in value])
    if kind is list:
        return [fill_refs(v, values) for v in value]
    if kind is dict:
        return {k: fill_refs(v, values) for k, v in value.items()}
    return values.get(DEVICE, value) if kind is torch.device else value


def dry_run(graph: Graph, batch: int = 1) -> dict[str, Any]:
    """Return every node's result for a batch of this size as meta tensors, which have shapes but no memory."""
    results: dict[str, Any] = {}
    shapes = [tuple(batch if n is None else n for n in shape) for shape in graph.shapes]
    inputs = [torch.empty(shape, dtype=dtype, device="meta") for shape, dtype in zip(shapes, graph.dtypes)]
    tensors = {name: tensor.to("meta") for name, tensor in graph.tensors.items()}

    def compute(op: str, args: Any, named: dict[str, Any]) -> Any:
        known = shape_of(op, args, named)
        return resolve(op)(*args, **named) if known is None else known

    with torch.no_grad():
        execute(graph, inputs, tensors, lambda node, value: results.update({node.name: value}), compute=compute)
    return results
