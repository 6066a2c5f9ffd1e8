"""A model as data: its operations in order and its tensors by name, recorded by `record.py` or captured with torch.export.

`capture` turns a model into a `Graph`, `run_graph` interprets one with torch's own operations, and `to_json` and `from_json`
store and read it. A graph that was read from a file contains permitted operations only: they compute values from values and
have no side effects.
"""

from optg.deploy.graph.capture import capture
from optg.deploy.graph.int8 import as_float, check_weights, count_graph, hidden_bytes, is_quantized
from optg.deploy.graph.interpret import (
    DEVICE,
    check_inputs,
    dry_run,
    execute,
    fill_refs,
    freed_after,
    one_line,
    order_inputs,
    run_graph,
    run_node,
)
from optg.deploy.graph.limits import IMAGE, LimitExceeded, Limits
from optg.deploy.graph.nodes import Graph, GraphError, Node, Ref, TensorKind, refs_in
from optg.deploy.graph.operations import resolve
from optg.deploy.graph.serialize import DTYPES, from_json, to_json

__all__ = [
    "DEVICE",
    "DTYPES",
    "IMAGE",
    "Graph",
    "GraphError",
    "LimitExceeded",
    "Limits",
    "Node",
    "Ref",
    "TensorKind",
    "as_float",
    "capture",
    "check_inputs",
    "check_weights",
    "count_graph",
    "dry_run",
    "execute",
    "fill_refs",
    "freed_after",
    "from_json",
    "hidden_bytes",
    "is_quantized",
    "one_line",
    "order_inputs",
    "refs_in",
    "resolve",
    "run_graph",
    "run_node",
    "to_json",
]
