"""Convert a graph to data that JSON can hold, and back. Reading checks every field and trusts none."""

import math
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from optg.deploy.graph.domains import MOST_DIMENSIONS
from optg.deploy.graph.interpret import DEVICE
from optg.deploy.graph.limits import NAMES, NODES, Limits
from optg.deploy.graph.nodes import TENSOR_KINDS, Graph, GraphError, Node, Ref, check_outputs, refs_in, require, shorten
from optg.deploy.graph.operations import is_permitted

INT64_MAX = 2**63 - 1
LONGEST_NAME = 1000
DEEPEST = 64  # modules in the name of a tensor
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
    require(type(inner) is str, f"graph: an argument has the tag {shorten(tag)} with a value of the wrong type")
    if tag == "ref":
        return Ref(inner)
    choices: dict[str, dict[str, Any]] = {
        "dtype": DTYPES,
        "format": MEMORY_FORMATS,
        "device": {"cpu": torch.device("cpu")},
        "float": {text: float(text) for text in ("inf", "-inf", "nan")},
    }
    known = tag in choices and inner in choices[tag]
    require(known, f"graph: an argument has the tag {shorten(tag)} with the unknown value {shorten(inner)}")
    return choices[tag][inner]


def from_json(data: Any, tensors: dict[str, Tensor], limits: Limits | None = None) -> Graph:
    """Return the graph with these tensors, which may be meta tensors.

    Raise GraphError for anything that `to_json` does not produce, and for anything above the limits.
    """
    limits = limits or Limits()
    require(type(data) is dict and sorted(data) == sorted(FIELDS), f"graph: expected exactly the fields {', '.join(FIELDS)}")
    kinds, aliases = data["kinds"], data["aliases"]
    check_tensor_names(kinds, aliases, tensors, limits)
    names = Names(set(tensors), set(aliases))
    inputs, dtypes, shapes = parse_inputs(data["inputs"], names)
    nodes = parse_nodes(data["nodes"], names, limits)
    outputs = decode_argument(data["outputs"])
    check_outputs(outputs)
    returned = set(refs_in(outputs))
    require(bool(returned) and returned <= names.known, 'graph: "outputs" must refer to values of the graph')
    graph = Graph(inputs, shapes, dtypes, nodes, outputs, dict(tensors), kinds, aliases, limits)
    limits.check_batch(graph, 1)
    return graph


def check_tensor_names(kinds: Any, aliases: Any, tensors: dict[str, Tensor], limits: Limits) -> None:
    require(type(kinds) is dict and set(kinds) == set(tensors), 'graph: "kinds" must have one entry for each tensor')
    require(all(kind in TENSOR_KINDS for kind in kinds.values()), f"graph: a tensor's kind must be one of {TENSOR_KINDS}")
    require(
        type(aliases) is dict and all(type(a) is str and kinds.get(a, "constant") != "constant" for a in aliases.values()),
        'graph: "aliases" must map names to names of parameters and buffers',
    )
    limits.require(len(tensors) + len(aliases), NAMES, "the graph has … tensors and aliases")
    modules: set[str] = set()
    for name in (*tensors, *aliases):
        *path, key = name.split(".")
        valid = len(name) <= LONGEST_NAME and len(path) <= DEEPEST and name.isprintable() and all((*path, key))
        require(valid, f"graph: {shorten(name)} is not a valid tensor name")
        modules.update(accumulate(path, "{}.{}".format))
        limits.require(len(modules), NAMES, "the names of tensors and aliases contain … modules")
    require(not set(aliases) & set(tensors), "graph: an alias has the name of a tensor")


class Names:
    """The names defined so far, each at most once."""

    def __init__(self, tensors: set[str], aliases: set[str]) -> None:
        self.known = tensors
        self.aliases = aliases

    def define(self, name: Any) -> str:
        """Add the name of a new value, or raise GraphError."""
        valid = type(name) is str and name != DEVICE and len(name) <= LONGEST_NAME and name.isprintable()
        require(valid, f"graph: {shorten(name)} is not a valid name")
        require(name not in self.known and name not in self.aliases, f"graph: the name {shorten(name)} is used twice")
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
        valid = type(shape) is list and len(shape) <= MOST_DIMENSIONS
        valid = valid and all(n is None or (type(n) is int and 0 <= n <= INT64_MAX) for n in shape)
        require(valid, f"graph: input {name} has an invalid shape; expected a list of sizes, null for the batch")
        shapes.append(tuple(shape))
        dtypes.append(DTYPES[dtype])
    return inputs, dtypes, shapes


def parse_nodes(entries: Any, names: Names, limits: Limits) -> list[Node]:
    nodes = []
    require(type(entries) is list, 'graph: "nodes" must be a list')
    limits.require(len(entries), NODES, "the graph has … nodes")
    for entry in entries:
        require(type(entry) is list and len(entry) == 4, "graph: a node must be [name, operation, arguments, named arguments]")
        name, op, args, kwargs = entry
        label = f"node {shorten(name)}"
        require(type(op) is str and is_permitted(op), f"{label}: operation {shorten(op)} is not permitted in a packed file")
        require(type(args) is list and type(kwargs) is dict, f"{label}: expected a list and a dict of arguments")
        node = Node(name, op, tuple(decode_argument(args)), {k: decode_argument(v) for k, v in kwargs.items()})
        for used in refs_in((node.args, node.kwargs)):
            require(used in names.known, f"{label}: uses {shorten(used)}, which is not defined before it")
        nodes.append(node)
        names.define(name)
    return nodes
