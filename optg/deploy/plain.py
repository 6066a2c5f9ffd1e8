"""A graph as plain data: what JSON can hold, and from there back, believing nothing."""

import math
from typing import Any

import torch
from torch import Tensor

from optg.deploy.graph import DEVICE, KINDS, Graph, check_outputs
from optg.deploy.operations import LARGEST, GraphError, Node, Ref, check_arguments, is_pure, refs_in, require

DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.complex128),
        *(torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.bool),
        *(torch.float8_e4m3fn, torch.float8_e5m2),
    )
}
FORMATS = {str(f).removeprefix("torch."): f for f in (torch.contiguous_format, torch.channels_last, torch.preserve_format)}


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
