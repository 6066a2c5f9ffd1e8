"""Run a graph with torch's own operations, or dry-run it on the meta device to learn every shape."""

import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from optg.deploy.graph.nodes import Graph, GraphError, Node, Ref, refs_in
from optg.deploy.graph.operations import CREATION_OPS, resolve
from optg.deploy.graph.shapes import shape_of

DEVICE = ""  # key of the device among the values; no value may have this name
Compute = Callable[[str, Any, dict[str, Any]], Any]  # computes an operation from its arguments


def call(op: str, args: Any, named: dict[str, Any]) -> Any:
    return resolve(op)(*args, **named)


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
    """Raise GraphError unless the inputs have the graph's shapes and the batch is within its limits. Return the batch size."""
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
    batch = batches[0] if batches else next((shape[0] or 0 for shape in graph.shapes if shape), 1)
    if graph.limits is not None and type(batch) is int:  # it is symbolic during an export
        graph.limits.check_batch(graph, batch)
    return batch


def execute(
    graph: Graph,
    inputs: Sequence[Tensor],
    tensors: dict[str, Tensor],
    on_value: Callable[[Node, Any], None] = lambda node, value: None,
    freed: dict[str, list[str]] | None = None,
    compute: Compute = call,
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
        values[node.name] = value = run_node(node, values, compute)
        on_value(node, value)
        for name in freed.get(node.name, ()):
            del values[name]
    return fill_refs(graph.outputs, values)


def run_node(node: Node, values: dict[str, Any], compute: Compute = call) -> Any:
    """Return a node's result. Raise GraphError with one line if its arguments do not fit, or if memory runs out."""
    try:
        named = fill_refs(node.kwargs, values) if node.kwargs else {}
        if node.op in CREATION_OPS and DEVICE in values:
            named["device"] = values[DEVICE]
        return compute(node.op, fill_refs(node.args, values), named)
    except GraphError as error:
        raise GraphError(f"node {node.name} ({node.op}): {error}") from None
    except Exception as error:  # torch raises many types for wrong arguments
        raise GraphError(f"node {node.name} ({node.op}) failed: {one_line(error)}") from error


def one_line(error: BaseException) -> str:
    """Return the first line of an error. torch reports missing memory with its own source lines: say only how much."""
    if found := re.search(r"tried to allocate (\d+) bytes", str(error)):
        return f"not enough memory for {int(found[1]):,} bytes"
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


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


def dry_run(
    graph: Graph,
    batch: int = 1,
    check: Callable[[str, Any, dict[str, Any]], None] | None = None,
    on_value: Callable[[Node, Any], None] = lambda node, value: None,
) -> dict[str, Any]:
    """Return every node's result for a batch of this size as meta tensors, which have shapes but no memory.

    Args:
        check: called with every operation and its arguments, before the operation.
        on_value: called with every node and its result.
    """
    results: dict[str, Any] = {}
    shapes = [tuple(batch if n is None else n for n in shape) for shape in graph.shapes]
    inputs = [torch.empty(shape, dtype=dtype, device="meta") for shape, dtype in zip(shapes, graph.dtypes)]
    tensors = {name: tensor.to("meta") for name, tensor in graph.tensors.items()}

    def compute(op: str, args: Any, named: dict[str, Any]) -> Any:
        if check is not None:
            check(op, args, named)
        known = shape_of(op, args, named)
        return call(op, args, named) if known is None else known

    def keep(node: Node, value: Any) -> None:
        results[node.name] = value
        on_value(node, value)

    with torch.no_grad():
        execute(graph, inputs, tensors, keep, compute=compute)
    return results
