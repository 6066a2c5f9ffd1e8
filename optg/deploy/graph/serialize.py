"""Convert a graph to data that JSON can hold, and back. Reading checks every field and trusts none."""

import math
from typing import Any

import torch
from torch import Tensor

from optg.deploy.graph.arguments import INT64_MAX, check_arguments
from optg.deploy.graph.interpret import DEVICE
from optg.deploy.graph.nodes import TENSOR_KINDS, Graph, GraphError, Node, Ref, check_outputs, refs_in, require
from optg.deploy.graph.operations import is_permitted

DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.complex128),
        *(torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.bool),
        *(torch.float8_e4m3fn, torch.float8_e5m2),
    )
}
MEMORY_FORMATS = {
    str(f).removeprefix("torch."): f for f in (torch.contiguous_format, torch.channels_last, torch.preserve_format)
}
FIELDS = ("inputs", "nodes", "outputs", "kinds", "aliases")


def to_json(graph: Graph) -> dict[str, Any]:
    """Return the graph without its tensors as JSON data. Raise GraphError if it uses an operation a file may not use."""
    for node in graph.nodes:
        if not is_permitted(node.op):
            raise GraphError(f"the model uses {node.op} (node {node.name}), which a packed file cannot hold")
    shapes, dtypes = [list(shape) for shape in graph.shapes], [str(d).removeprefix("torch.") for d in graph.dtypes]
    return {
        "inputs": [list(entry) for entry in zip(graph.inputs, dtypes, shapes)],
        "nodes": [
            [n.name, n.op, encode_argument(list(n.args)), {k: encode_argument(v) for k, v in n.kwargs.items()}]
            for n in graph.nodes
        ],
        "outputs": encode_argument(graph.outputs),
        "kinds": dict(graph.kinds),
        "aliases": dict(graph.aliases),
    }


def encode_argument(value: Any) -> Any:
    if isinstance(value, Ref):
        return {"ref": value.name}
    if isinstance(value, list):
        return [encode_argument(v) for v in value]
    if isinstance(value, tuple):
        return {"tuple": [encode_argument(v) for v in value]}
    if isinstance(value, dict):
        return {"dict": {k: encode_argument(v) for k, v in value.items()}}
    if isinstance(value, torch.dtype) and str(value).removeprefix("torch.") in DTYPES:
        return {"dtype": str(value).removeprefix("torch.")}
    if isinstance(value, torch.memory_format) and str(value).removeprefix("torch.") in MEMORY_FORMATS:
        return {"format": str(value).removeprefix("torch.")}
    if isinstance(value, torch.device):
        return {"device": "cpu"}
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": str(value)}
    if value is None or type(value) in (bool, int, float, str):
        return value
    raise GraphError(f"the model uses a value of type {type(value).__name__}, which a packed file cannot hold")


def decode_argument(value: Any) -> Any:
    """Invert `encode_argument`. Raise GraphError for anything it does not produce."""
    if value is None or type(value) in (bool, str):
        return value
    if type(value) is int:
        require(-INT64_MAX - 1 <= value <= INT64_MAX, "graph: an integer is out of range")
        return value
    if type(value) is float:
        require(math.isfinite(value), "graph: a number is not finite")
        return value
    if type(value) is list:
        return [decode_argument(v) for v in value]
    require(type(value) is dict and len(value) == 1, "graph: an argument must be a plain value, a list or a dict with one tag")
    ((tag, inner),) = value.items()
    if tag == "tuple" and type(inner) is list:
        return tuple(decode_argument(v) for v in inner)
    if tag == "dict" and type(inner) is dict:
        return {k: decode_argument(v) for k, v in inner.items()}
    require(type(inner) is str, f"graph: an argument has the tag {tag!r} with a value of the wrong type")
    if tag == "ref":
        return Ref(inner)
    choices: dict[str, dict[str, Any]] = {
        "dtype": DTYPES,
        "format": MEMORY_FORMATS,
        "device": {"cpu": torch.device("cpu")},
        "float": {text: float(text) for text in ("inf", "-inf", "nan")},
    }
    require(
        tag in choices and inner in choices[tag], f"graph: an argument has the tag {tag!r} with the unknown value {inner!r}"
    )
    return choices[tag][inner]


def from_json(data: Any, tensors: dict[str, Tensor]) -> Graph:
    """Return the graph with these tensors. Raise GraphError for anything that `to_json` does not produce."""
    require(type(data) is dict and sorted(data) == sorted(FIELDS), f"graph: expected exactly the fields {', '.join(FIELDS)}")
    kinds, aliases = data["kinds"], data["aliases"]
    check_tensor_names(kinds, aliases, tensors)
    names = Names(set(tensors), set(aliases))
    inputs, dtypes, shapes = parse_inputs(data["inputs"], names)
    nodes = parse_nodes(data["nodes"], names)
    outputs = decode_argument(data["outputs"])
    check_outputs(outputs)
    returned = set(refs_in(outputs))
    require(bool(returned) and returned <= names.known, 'graph: "outputs" must refer to values of the graph')
    return Graph(inputs, shapes, dtypes, nodes, outputs, dict(tensors), kinds, aliases)


def check_tensor_names(kinds: Any, aliases: Any, tensors: dict[str, Tensor]) -> None:
    require(type(kinds) is dict and set(kinds) == set(tensors), 'graph: "kinds" must have one entry for each tensor')
    require(all(kind in TENSOR_KINDS for kind in kinds.values()), f"graph: a tensor's kind must be one of {TENSOR_KINDS}")
    require(
        type(aliases) is dict and all(type(a) is str and kinds.get(a, "constant") != "constant" for a in aliases.values()),
        'graph: "aliases" must map names to names of parameters and buffers',
    )
    for name in (*tensors, *aliases):
        require(name.isprintable() and all(name.split(".")), f"graph: {name!r} is not a valid tensor name")
    require(not set(aliases) & set(tensors), "graph: an alias has the name of a tensor")


class Names:
    """The names defined so far, each at most once."""

    def __init__(self, tensors: set[str], aliases: set[str]) -> None:
        self.known = tensors
        self.aliases = aliases

    def define(self, name: Any) -> str:
        """Add the name of a new value, or raise GraphError."""
        require(type(name) is str and name != DEVICE and name.isprintable(), f"graph: {name!r} is not a valid name")
        require(name not in self.known and name not in self.aliases, f"graph: the name {name!r} is used twice")
        self.known.add(name)
        return name


def parse_inputs(entries: Any, names: Names) -> tuple[list[str], list[torch.dtype], list[tuple[int | None, ...]]]:
    inputs, dtypes, shapes = [], [], []
    require(type(entries) is list and len(entries) > 0, 'graph: "inputs" must be a list with at least one input')
    for entry in entries:
        require(type(entry) is list and len(entry) == 3, "graph: an input must be [name, dtype, shape]")
        name, dtype, shape = entry
        inputs.append(names.define(name))
        require(type(dtype) is str and dtype in DTYPES, f"graph: input {name} has an unknown dtype")
        valid = type(shape) is list and all(n is None or (type(n) is int and 0 <= n <= INT64_MAX) for n in shape)
        require(valid, f"graph: input {name} has an invalid shape; expected a list of sizes, null for the batch")
        shapes.append(tuple(shape))
        dtypes.append(DTYPES[dtype])
    return inputs, dtypes, shapes


def parse_nodes(entries: Any, names: Names) -> list[Node]:
    nodes = []
    require(type(entries) is list, 'graph: "nodes" must be a list')
    for entry in entries:
        require(type(entry) is list and len(entry) == 4, "graph: a node must be [name, operation, arguments, named arguments]")
        name, op, args, kwargs = entry
        require(type(op) is str and is_permitted(op), f"node {name!r}: operation {op!r} is not permitted in a packed file")
        require(type(args) is list and type(kwargs) is dict, f"node {name!r}: expected a list and a dict of arguments")
        node = Node(name, op, tuple(decode_argument(args)), {k: decode_argument(v) for k, v in kwargs.items()})
        check_arguments(node)
        for used in refs_in((node.args, node.kwargs)):
            require(used in names.known, f"node {name!r}: uses {used!r}, which is not defined before it")
        nodes.append(node)
        names.define(name)
    return nodes
