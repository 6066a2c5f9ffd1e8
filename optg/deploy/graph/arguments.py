"""Checks of a node's arguments against the operation's signature.

torch crashes on some arguments that its own schema rules out, such as a number where it expects a dtype, and on some sizes
near the end of the integer range. Nodes that come from a file are checked here before they can run.
"""

from typing import Any

import torch

from optg.deploy.graph.nodes import Node, Ref, require
from optg.deploy.graph.operations import PYTHON_FUNCTIONS, resolve

INT64_MAX = 2**63 - 1
LARGEST_WINDOW = 2**16

ACCEPTED_TYPES: dict[str, tuple[type, ...]] = {
    "Tensor": (bool, int, float),  # torch turns a number into a tensor
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
    """Raise GraphError unless the arguments match the operation's signature and stay in range."""
    if node.op in PYTHON_FUNCTIONS:
        require(not node.kwargs, f"node {node.name!r}: {node.op} takes no named arguments")
        return
    parameters = resolve(node.op)._schema.arguments  # type: ignore[attr-defined]
    require(len(node.args) <= len(parameters), f"node {node.name!r}: too many arguments for {node.op}")
    given = {**{p.name: value for p, value in zip(parameters, node.args)}, **node.kwargs}
    types = {p.name: str(p.real_type) for p in parameters}
    for name, value in given.items():
        accepted = name in types and matches_type(value, types[name])
        require(accepted, f"node {node.name!r}: {node.op} does not accept this argument {name!r}")
        in_range = "int" not in types[name] or all_within(value, size_limit(node.op))
        require(in_range, f"node {node.name!r}: argument {name!r} is out of range")


def matches_type(value: Any, torch_type: str) -> bool:
    """Return whether a value may be passed where torch's schema asks for this type."""
    outer, _, inner = torch_type.removesuffix("]").partition("[")
    if outer == "Optional":
        return value is None or matches_type(value, inner)
    if outer == "List" and isinstance(value, (list, tuple)):
        return all(matches_type(v, inner) for v in value)
    if outer == "List":  # torch repeats a single number
        return inner != "Tensor" and matches_type(value, inner)
    if isinstance(value, Ref):
        return torch_type in ("Tensor", "int", "float", "number")
    return type(value) in ACCEPTED_TYPES.get(torch_type, ())


def size_limit(op: str) -> int:
    """Return the largest integer that the operation's kernel handles safely. Beyond it some crash or never return."""
    if "slice" in op:
        return INT64_MAX  # torch's own end of an open slice
    return LARGEST_WINDOW if any(word in op for word in ("pool", "conv", "chunk")) else 2**31


def all_within(value: Any, limit: int) -> bool:
    """Return whether every integer is within ±limit. A Ref is unknown until the graph runs, so window sizes may not be Refs."""
    if isinstance(value, Ref):
        return limit > LARGEST_WINDOW
    if isinstance(value, (list, tuple)):
        return all(all_within(v, limit) for v in value)
    return not isinstance(value, int) or -limit <= value <= limit
