"""The domains of arguments in a packed file: types, ranges and dtypes.

torch trusts its callers. It crashes on some arguments, and on others it reads memory that nobody wrote. So every argument of
every operation of a file is checked here, in a dry run that knows all sizes and dtypes, before the operation can run.
"""

import re
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from optg.deploy.graph.int8 import LARGEST_SCALE, SMALLEST_SCALE, is_scale
from optg.deploy.graph.nodes import GraphError, shorten
from optg.deploy.graph.operations import DOMAINS_OF, PYTHON_FUNCTIONS, resolve

MOST_DIMENSIONS = 8
MOST_PIECES = 1024  # tensors that one operation takes or returns
FLOATS = {torch.float32, torch.float64, torch.float16, torch.bfloat16}
INTEGERS = {torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8}
REALS = FLOATS | INTEGERS | {torch.bool}
ATTENTION, EXPAND = "aten.scaled_dot_product_attention.default", "aten.expand.default"
EQUATION = re.compile("[A-Za-z, ]{1,64}->[A-Za-z ]{0,64}")


class Domain(NamedTuple):
    expected: str  # for error messages
    accepts: Callable[[Any], bool]


def tensors(kind: str, dtypes: set[torch.dtype]) -> Domain:
    return Domain(
        f"a tensor of {kind} with at most {MOST_DIMENSIONS} dimensions",
        lambda value: isinstance(value, Tensor) and value.dtype in dtypes and value.ndim <= MOST_DIMENSIONS,
    )


def integers(low: int, high: int) -> Domain:
    return Domain(f"an integer from {low} to {high}", lambda value: type(value) is int and low <= value <= high)


def lists(of: Domain, least: int, most: int) -> Domain:
    """One value for all dimensions, or a list with one for each."""

    def accepts(value: Any) -> bool:
        if isinstance(value, (list, tuple)):
            return least <= len(value) <= most and all(map(of.accepts, value))
        return of.accepts(value)

    return Domain(f"{least} to {most} values, each {of.expected}", accepts)


def one_of(*values: Any) -> Domain:
    return Domain(" or ".join(map(repr, values)), lambda value: any(type(value) is type(v) and value == v for v in values))


number = Domain("a number", lambda value: type(value) in (bool, int, float))
real = tensors("real numbers", REALS)
DOMAINS = {
    "real": real,
    "float": tensors("floating-point numbers", FLOATS),
    "index": tensors("int32 or int64", {torch.int32, torch.int64}),
    "mask": tensors("bool", {torch.bool}),
    "single": tensors("float32", {torch.float32}),
    "bytes": tensors("uint8", {torch.uint8}),
    "signed": tensors("int8", {torch.int8}),
    "pair": lists(tensors("floating-point numbers", FLOATS), 1, 2),
    "number": number,
    "operand": Domain("a real tensor or a number", lambda value: real.accepts(value) or number.accepts(value)),
    "zero": Domain("0", lambda value: type(value) in (int, float) and value == 0),
    "bool": one_of(True, False),
    "no": one_of(False),
    "count": integers(1, 2**16),
    "bound": integers(-(2**31), 2**31),
    "position": integers(-(2**62), 2**63 - 1),  # torch writes the end of an open slice as 2**63 - 1
    "dim": integers(-MOST_DIMENSIONS, MOST_DIMENSIONS - 1),
    "dims": lists(integers(-MOST_DIMENSIONS, MOST_DIMENSIONS - 1), 0, MOST_DIMENSIONS),
    "sizes": lists(integers(0, 2**31), 0, MOST_PIECES),
    "extents": lists(integers(-1, 2**31), 0, MOST_DIMENSIONS),
    "steps": lists(integers(1, 2**12), 1, 2),
    "stride": lists(integers(1, 2**12), 0, 2),
    "padding": lists(integers(0, 2**8), 1, 2),
    "border": lists(integers(-(2**12), 2**12), 0, 2 * MOST_DIMENSIONS),
    "shifts": lists(integers(-(2**31), 2**31), 1, MOST_DIMENSIONS),
    "byte": integers(0, 255),
    "scale": Domain(f"a number from {SMALLEST_SCALE:.1e} to {LARGEST_SCALE:.1e}", is_scale),
    "scales": lists(Domain("a factor from 1/64 to 64", lambda value: type(value) is float and 1 / 64 <= value <= 64), 1, 2),
    "same": one_of("same", "valid"),
    "edge": one_of("constant", "reflect", "replicate"),
    "gelu": one_of("none", "tanh"),
    "floor": one_of("floor"),
    "indexing": one_of("ij", "xy"),
    "equation": Domain("letters, commas and an arrow", lambda value: type(value) is str and bool(EQUATION.fullmatch(value))),
    "dtype": Domain("a real dtype", lambda value: isinstance(value, torch.dtype) and value in REALS),
    "format": Domain("a memory format", lambda value: isinstance(value, torch.memory_format)),
    "device": Domain("a device", lambda value: isinstance(value, torch.device)),
}  # fmt: skip


@cache
def domain(name: str) -> Domain:
    """Return a domain by its name in the table of operations."""
    if name[-1] not in "?*":
        return DOMAINS[name]
    item = domain(name[:-1])
    if name[-1] == "?":
        return Domain(f"None, or {item.expected}", lambda value: value is None or item.accepts(value))
    several = lists(item, 1, MOST_PIECES)
    return Domain(several.expected, lambda value: isinstance(value, (list, tuple)) and several.accepts(value))


@cache
def parameter_names(op: str) -> list[str]:
    return [argument.name for argument in resolve(op)._schema.arguments]  # type: ignore[attr-defined]


def check_arguments(op: str, args: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Raise GraphError unless every argument is in its domain. Return the arguments by name; {} for functions on sizes."""
    if op in PYTHON_FUNCTIONS:
        if kwargs or len(args) > 2:
            raise GraphError("expected at most two arguments")
        return {}
    names = parameter_names(op)
    if len(args) > len(names):
        raise GraphError(f"got {len(args)} arguments; expected at most {len(names)}")
    given = {**dict(zip(names, args)), **kwargs}
    domains = DOMAINS_OF[op]
    for name, value in given.items():
        if name not in domains:
            raise GraphError(f"the argument {name!r} is not permitted")
        if not domain(domains[name]).accepts(value):
            raise GraphError(f"{name} is {describe(value)}; expected {domain(domains[name]).expected}")
    if given.get("training") and any(given.get(name) is not None for name in ("running_mean", "running_var")):
        raise GraphError("it would change the running statistics, because training is True")
    if op == ATTENTION and any(given[name].numel() == 0 for name in ("query", "key", "value") if name in given):
        raise GraphError("its query, key or value is empty")  # torch would divide by the number of heads
    if op == EXPAND and -1 in new_dimensions(given):
        raise GraphError(f"size is {describe(given['size'])}; expected no -1 for a new dimension")
    if (pieces := count_pieces(op, given)) > MOST_PIECES:
        raise GraphError(f"it splits a tensor into {pieces:,} pieces; expected at most {MOST_PIECES:,}")
    return given


def describe(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a {value.ndim}-dimensional tensor of {value.dtype}"
    return shorten(value)


def count_pieces(op: str, given: dict[str, Any]) -> int:
    """Return how many tensors a split produces; 0 for other operations."""
    if op == "aten.unbind.int":
        return split_size(given)
    if op == "aten.split.Tensor":
        return -(-split_size(given) // given.get("split_size", 1))
    return given.get("chunks", 0) if op == "aten.chunk.default" else 0


def new_dimensions(given: dict[str, Any]) -> Any:
    """Return the sizes of the dimensions that `expand` adds. For a tensor without dimensions torch returns one of size -1."""
    sizes = given.get("size", ())
    return sizes[: max(0, len(sizes) - given["self"].ndim)] if isinstance(sizes, (list, tuple)) and "self" in given else ()


def split_size(given: dict[str, Any]) -> int:
    shape, dim = given["self"].shape, given.get("dim", 0)
    return shape[dim] if -len(shape) <= dim < len(shape) else 0
