"""Forge packed files with matching checksums: mutate a good one, or grow a graph of random operations."""

import random
from collections.abc import Callable
from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from optg.deploy.engine.ops import RULES
from optg.deploy.graph import DTYPES, Graph, GraphError, Node, Ref, capture, to_json
from optg.deploy.graph.domains import FLOATS, REALS, check_arguments
from optg.deploy.graph.operations import DOMAINS_OF, PYTHON_FUNCTIONS, resolve
from optg.deploy.graph.serialize import encode_argument
from optg.deploy.packed import About, pack
from tests.deploy.engine.int8.graphs import small_int8_net
from tests.deploy.nets import Odd
from tests.deploy.packed.test_damaged_files import UNEXPECTED_VALUES, join, json_paths, small_file, split

FAMILY = 8  # mutants of one file
EDGES = (-(2**63), -(2**31), -9, -8, -2, -1, 0, 1, 2, 3, 4, 7, 8, 16, 63, 64, 1023, 1024, 4095, 4096, 2**16, 2**31, 2**63 - 1)
SMALL = (0, 1, 1, 1, 2, 2, 3, 4)
SHAPES = ((None, 3, 8, 8), (None, 1, 4, 4), (2, 3, 5, 7), (None, 16), (None, 4, 6), (None, 2, 3, 4, 5))  # the engine has four
NUMBERS = (0, 1, -1, 2, 0.5, -0.5, 1e-6, 1e30, -1e30, float("inf"), float("-inf"), float("nan"), 2**31, -(2**31))
EQUATIONS = ("ij,jk->ik", "bij,bjk->bik", "bchw,dc->bdhw", "ab,ab->", "ii,i->i", "abc,cd->abd", "ab,cd->abcd")
GOOD_DTYPES, ALL_DTYPES = sorted(REALS, key=str), list(DTYPES.values())


@cache
def bases() -> list[bytes]:
    """Return good files: a convolutional net, one with unusual layers, a transformer layer, and a net in int8."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, activation="gelu")
    token = nn.Sequential(nn.Conv2d(1, 8, 3, 3), nn.Flatten(2), nn.Linear(4, 8), layer)
    about = About("forged", 3, (1, 6, 6))
    odd = pack(capture(Odd().eval(), torch.zeros(2, 3, 8, 8)), About("odd", 8, (3, 8, 8)))
    int8 = pack(small_int8_net(), About("int8", 10, (3, 13, 11)))
    return [small_file(), odd, pack(capture(token.eval(), torch.zeros(2, 1, 6, 6)), about), int8]


def forge(seed: int, gentle: bool = False) -> bytes:
    """Return a forged file. Eight seeds in a row are mutants of the same file: to grow one takes longer than to mutate it.

    Args:
        gentle: forge files that the engine accepts more often.
    """
    family, variant = divmod(seed, FAMILY)
    base = family_base(family, gentle)
    return base if variant == 0 and family % 2 else mutated(random.Random(seed), base, gentle)


@lru_cache(maxsize=1)
def family_base(family: int, gentle: bool) -> bytes:
    """Return the file that a family is mutated from: a good one, or a grown graph."""
    rng = random.Random(f"family {family}")
    return grown(rng, gentle) if family % 2 or (gentle and family % 8) else rng.choice(bases())


# ---- mutations


def mutated(rng: random.Random, base: bytes, gentle: bool) -> bytes:
    header, body = split(base)
    for _ in range(1 if gentle else rng.choice((1, 1, 1, 1, 2, 3, 5))):
        try:
            body = rng.choice(GENTLE_MUTATIONS if gentle else MUTATIONS)(rng, header, body)
        except (LookupError, TypeError, ValueError, AttributeError):  # an earlier mutation removed what this one changes
            continue
    return join(header, body)


def change_operation(rng: random.Random, header: Any, body: bytes) -> bytes:
    rng.choice(header["graph"]["nodes"])[1] = rng.choice([*DOMAINS_OF, *PYTHON_FUNCTIONS])
    return body


def change_argument(rng: random.Random, header: Any, body: bytes) -> bytes:
    nodes = header["graph"]["nodes"]
    args = rng.choice(nodes)[2]
    refs = [{"ref": name} for name in (*header["graph"]["kinds"], *(node[0] for node in nodes))]
    args[rng.randrange(len(args))] = rng.choice([rng.choice(EDGES), [rng.choice(EDGES)] * 2, rng.choice(refs), None, True, 0.5])
    return body


def names_before(header: Any, at: int) -> list[str]:
    """Return the names of the inputs, of the first nodes and of the stored tensors."""
    graph = header["graph"]
    return [*(entry[0] for entry in graph["inputs"]), *(node[0] for node in graph["nodes"][:at]), *graph["kinds"]]


def redraw_argument(rng: random.Random, header: Any, body: bytes) -> bytes:
    """Replace an argument by another one from its domain."""
    nodes = header["graph"]["nodes"]
    at = rng.randrange(len(nodes))
    known = names_before(header, at)
    _, op, args, named = nodes[at]
    name, text = rng.choice(list(DOMAINS_OF[op].items()))
    value = encode_argument(draw(rng, text, known, {}))
    place = [parameter.name for parameter in resolve(op)._schema.arguments].index(name)  # type: ignore[attr-defined]
    if place < len(args):
        args[place] = value
    else:
        named[name] = value
    return body


def insert_operation(rng: random.Random, header: Any, body: bytes) -> bytes:
    nodes = header["graph"]["nodes"]
    at = rng.randrange(len(nodes))
    known = names_before(header, at)
    op = rng.choice(list(DOMAINS_OF))
    arguments = {name: draw(rng, text, known, {}) for name, text in DOMAINS_OF[op].items()}
    nodes.insert(at, [f"new{len(nodes)}", op, [], {name: encode_argument(value) for name, value in arguments.items()}])
    later = rng.choice(nodes[at + 1 :])
    later[2][0] = {"ref": f"new{len(nodes) - 1}"}
    return body


def change_tensor(rng: random.Random, header: Any, body: bytes) -> bytes:
    row = rng.choice(header["tensors"])
    kind = rng.randrange(3)
    if kind == 0:
        row["shape"] = rng.sample(row["shape"], len(row["shape"]))
    elif kind == 1:
        row["shape"] = rng.choice(([], [1, *row["shape"]], [*row["shape"], 1], [0], [-1]))
    else:
        row["dtype"] = row["stored"] = rng.choice(list(DTYPES))
    return body


def change_input(rng: random.Random, header: Any, body: bytes) -> bytes:
    entry = rng.choice(header["graph"]["inputs"])
    if rng.random() < 0.3:
        entry[1] = rng.choice(list(DTYPES))
    else:
        entry[2][rng.randrange(len(entry[2]))] = rng.choice([None, *EDGES])
    return body


def change_output(rng: random.Random, header: Any, body: bytes) -> bytes:
    names = [node[0] for node in header["graph"]["nodes"]] + list(header["graph"]["kinds"])
    header["graph"]["outputs"] = [{"ref": rng.choice(names)} for _ in range(rng.choice((1, 2, 3)))]
    return body


def change_bytes(rng: random.Random, header: Any, body: bytes) -> bytes:
    changed = bytearray(body)
    for _ in range(rng.choice((1, 4, 64))):
        changed[rng.randrange(len(changed))] = rng.choice((0, 0x7F, 0x80, 0xFF, rng.randrange(256)))
    return bytes(changed)


def change_anything(rng: random.Random, header: Any, body: bytes) -> bytes:
    *path, key = rng.choice(json_paths(header)[1:])
    holder = header
    for step in path:
        holder = holder[step]
    holder[key] = rng.choice(UNEXPECTED_VALUES)
    return body


MUTATIONS: list[Callable[[random.Random, Any, bytes], bytes]] = [
    change_operation, change_argument, change_argument, *[redraw_argument] * 4, *[insert_operation] * 3,
    change_tensor, change_input, change_output, change_bytes, change_anything,
]  # fmt: skip
GENTLE_MUTATIONS = [redraw_argument, redraw_argument, insert_operation, change_output, change_bytes]


# ---- a graph of random operations that fit together


def grown(rng: random.Random, gentle: bool = False) -> bytes:
    """Return a file whose operations pass the dry run, mostly, so that torch and the engine have to run them."""
    generator = torch.Generator().manual_seed(rng.randrange(2**31))
    shape = rng.choice(SHAPES[:4] if gentle else SHAPES)
    dtype = torch.float32 if gentle else rng.choice([torch.float32] * 6 + [torch.float64, torch.bfloat16, torch.int64])
    batch = 2
    values: dict[str, Any] = {"x": torch.empty([batch if n is None else n for n in shape], dtype=dtype, device="meta")}
    tensors: dict[str, Tensor] = {}
    for i in range(rng.choice((0, 2, 4))):
        sizes = [rng.choice(SMALL + shape[1:2] * 4) for _ in range(rng.choice((1, 2, 4, 4)))]
        tensors[f"t{i}"] = torch.randn(sizes, generator=generator) * (torch.rand(sizes, generator=generator) < 0.4)
        if rng.random() < 0.2:
            tensors[f"t{i}"] = (tensors[f"t{i}"] * 3).to(rng.choice(GOOD_DTYPES))
        values[f"t{i}"] = tensors[f"t{i}"].to("meta")
    nodes: list[Node] = []
    for i in range(rng.choice((3, 6, 12))):
        for _ in range(30):
            node = random_node(rng, f"n{i}", values, 0.9 if gentle else 0.6)
            if (value := dry_result(node, values)) is not None:
                nodes.append(node)
                values[node.name] = value
                break
    made = [node.name for node in nodes if isinstance(values[node.name], Tensor)] or ["x"]
    outputs = [Ref(name) for name in {made[-1], rng.choice(made)}]
    graph = Graph(["x"], [shape], [dtype], nodes, outputs, tensors, dict.fromkeys(tensors, "buffer"))
    plain = Graph(["x"], [shape], [dtype], [], Ref("x"), tensors, dict.fromkeys(tensors, "buffer"))
    header, body = split(pack(plain, About("grown", 3, (3,)), "float32"))
    header["graph"] = to_json(graph)
    return join(header, body)


def random_node(rng: random.Random, name: str, values: dict[str, Any], lowered: float) -> Node:
    """Return a random operation on some of the values; one of the engine's with the probability `lowered`."""
    lists = [key for key, value in values.items() if isinstance(value, (list, tuple))]
    if lists and rng.random() < 0.5:
        return Node(name, "operator.getitem", (Ref(rng.choice(lists)), rng.choice((0, 1, -1, 2))))
    op = rng.choice(LOWERED if rng.random() < lowered else list(DOMAINS_OF))
    recent = list(values)[-4:] + list(values)
    given = {key: draw(rng, text, recent, values) for key, text in DOMAINS_OF[op].items() if rng.random() < 0.9}
    args = []
    for parameter in resolve(op)._schema.arguments if rng.random() < 0.7 else ():  # type: ignore[attr-defined]
        if parameter.kwarg_only or parameter.name not in given:
            break
        args.append(given.pop(parameter.name))
    return Node(name, op, tuple(args), given)


def dry_result(node: Node, values: dict[str, Any]) -> Any:
    """Return the node's result on the meta device, if its arguments fit and it is small."""
    from optg.deploy.graph import fill_refs

    try:
        given = fill_refs(node.kwargs, values)
        args = fill_refs(node.args, values)
        check_arguments(node.op, args, given)
        result = resolve(node.op)(*args, **given)
    except GraphError:
        return None
    except Exception:  # torch raises many types for wrong arguments
        return None
    parts = result if isinstance(result, (list, tuple)) else [result]
    return result if sum(p.numel() for p in parts if isinstance(p, Tensor)) < 200_000 else None


def draw(rng: random.Random, text: str, names: list[str], values: dict[str, Any]) -> Any:
    """Return an argument from a domain, mostly; now and then from outside of it."""
    if text.endswith("?"):
        return None if rng.random() < 0.4 else draw(rng, text[:-1], names, values)
    if text.endswith("*"):
        return [draw(rng, text[:-1], names, values) for _ in range(rng.choice((1, 2, 2, 3)))]
    if rng.random() < 0.02:
        return rng.choice((None, 0, -1, 0.5, True, "x", [], [0, 0], Ref(rng.choice(names))))
    if text in DRAWN:
        return DRAWN[text](rng)
    return draw_tensor(rng, text, names, values)


def draw_tensor(rng: random.Random, text: str, names: list[str], values: dict[str, Any]) -> Any:
    if text == "pair":
        return [draw_tensor(rng, "float", names, values) for _ in range(2)]
    if text == "operand" and rng.random() < 0.4:
        return rng.choice(NUMBERS)
    fits = [name for name in names if isinstance(values.get(name), Tensor) and values[name].dtype in KINDS[text]]
    return Ref(rng.choice(fits or names))


LOWERED = [op for op in DOMAINS_OF if op.split(".")[1] in RULES]  # the operations of the engine
KINDS = {
    "real": REALS, "operand": REALS, "float": FLOATS, "index": {torch.int32, torch.int64}, "mask": {torch.bool},
    "single": {torch.float32}, "bytes": {torch.uint8}, "signed": {torch.int8},
}  # fmt: skip


def several(*values: Any) -> Callable[[random.Random], Any]:
    return lambda rng: [rng.choice(values) for _ in range(rng.choice((1, 2, 2, 3, 4)))]


def pairs(*values: Any) -> Callable[[random.Random], Any]:
    return lambda rng: [rng.choice(values) for _ in range(rng.choice((1, 2, 2)))]


DRAWN: dict[str, Callable[[random.Random], Any]] = {
    "number": lambda rng: rng.choice(NUMBERS),
    "zero": lambda rng: 0.0,
    "bool": lambda rng: rng.random() < 0.5,
    "no": lambda rng: False,
    "count": lambda rng: rng.choice((1, 1, 2, 3, 4, 8, 64)),
    "bound": lambda rng: rng.choice((0, 1, 2, 5, 16, -3, 100)),
    "position": lambda rng: rng.choice((*SMALL, -1, -2, 5, 2**63 - 1, -(2**62))),
    "dim": lambda rng: rng.choice((0, 1, 2, 3, -1, -2, 1, -1, 7)),
    "dims": lambda rng: rng.sample(range(-2, 5), rng.choice((0, 1, 2, 2, 3, 4))),
    "sizes": several(*SMALL, 5, 8, 0),
    "extents": several(*SMALL, -1, -1, 8),
    "steps": pairs(1, 1, 2, 3, 4, 7, 100, 4096),
    "stride": lambda rng: rng.choice(([], [1, 1], [2, 2], [2], [3, 1], [4096, 1])),
    "padding": pairs(0, 0, 1, 1, 2, 5, 64, 256),
    "border": lambda rng: [rng.choice((0, 0, 1, 2, -1, 5)) for _ in range(rng.choice((2, 2, 4, 4, 6, 1)))],
    "shifts": several(0, 1, -1, 3, 2**31),
    "byte": lambda rng: rng.choice((0, 1, 7, 128, 254, 255)),
    "scale": lambda rng: rng.choice((2.0**-40, 1e-3, 0.03, 1.0, 50.0, 2.0**40)),
    "scales": pairs(0.5, 1.0, 2.0, 1.7, 64.0, 1 / 64),
    "same": lambda rng: rng.choice(("same", "valid")),
    "edge": lambda rng: rng.choice(("constant", "constant", "reflect", "replicate")),
    "gelu": lambda rng: rng.choice(("none", "tanh")),
    "floor": lambda rng: "floor",
    "indexing": lambda rng: rng.choice(("ij", "xy")),
    "equation": lambda rng: rng.choice(EQUATIONS),
    "dtype": lambda rng: rng.choice(GOOD_DTYPES if rng.random() < 0.9 else ALL_DTYPES),
    "format": lambda rng: rng.choice((torch.contiguous_format, torch.preserve_format, torch.channels_last)),
    "device": lambda rng: torch.device("cpu"),
}  # fmt: skip
