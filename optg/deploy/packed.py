"""One file for a sparse model: its graph, where its weights are, and what they are. Data only: nothing in it can run.

    magic, version, length and SHA-256 of the header
    header      JSON: the graph, a table of tensors, what the model is for, and the SHA-256 of what follows
    blobs       for each tensor of the table, with nothing between them: the mask's quotients, its remainders, the values

A tensor with zeros is a mask and the values that are left. The mask is the number of zeros before each value, in Rice's code:
g = q·2ᵏ + r, q as so many zero bits and a one, all of them first, then every r in k bits. At 98 % zeros this takes 7.1 bits a
value, 0.14 a weight, within 1 % of the entropy; with k = 0 it is the plain bitmap. "Zero" means that all bits are: −0.0 is a
value, and what is read back is bit for bit what was written. Only float32 weights of matrices and convolutions may be written
as bfloat16; then they come back as the float32 values nearest to that.
"""

import hashlib
import json
import math
import struct
import sys
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from optg.deploy.graph import Graph, check_inputs, dry_run, execute, in_order, last_uses
from optg.deploy.operations import GraphError
from optg.deploy.plain import DTYPES, from_json, to_json
from optg.files import atomic_write

MAGIC = b"\x93optg\r\n\x1a"
VERSION = 1
PREFIX = struct.Struct("<8sIQ32s")
Values = Literal["float32", "bfloat16"]

# What a file may unfold to. A model of 99.9 % zeros is up to 1,000 times its file; beyond that a claim is not believed.
LARGEST_RATIO, ALWAYS_FINE = 1024, 2**28
LARGEST_VALUE = 2**30  # bytes of one intermediate result for one image


class PackedError(ValueError):
    """A file that is not a packed model, or is damaged, or claims what cannot be."""


@dataclass(frozen=True)
class About:
    """What a model is, what it takes, and where it came from."""

    name: str
    classes: int
    shape: tuple[int, ...]  # of one image: channels, height, width
    mean: tuple[float, ...] | None = None  # of each channel, where a pixel is 0 to 1; None: not known
    std: tuple[float, ...] | None = None
    centre: float = 1.0  # the share of an image's short side that is seen: a square in the middle, resized
    labels: tuple[str, ...] | None = None  # the classes' names
    account: dict[str, int] = field(default_factory=dict)  # parameters, nonzero, flops, dense_flops
    origin: dict[str, str | int | float | bool | None] = field(default_factory=dict)  # recipe, method, accuracy, versions, …


class Packed(nn.Module):
    """A model from a packed file. Its state_dict has the names and values of the model it was made from."""

    def __init__(self, graph: Graph, about: About) -> None:
        super().__init__()
        self.about = about
        self._graph = replace(graph, tensors={})
        self._over = last_uses(graph)
        for name, tensor in graph.tensors.items():
            kind = graph.kinds[name]
            value = nn.Parameter(tensor, tensor.is_floating_point()) if kind == "parameter" else tensor
            for known in (name, *(alias for alias, first in graph.aliases.items() if first == name)):
                self._put(known, value, kind)
        self.eval()

    def _put(self, name: str, tensor: Tensor, kind: str) -> None:
        """Register a tensor under its name, in plain modules that carry the names' parts."""
        module: nn.Module = self
        *path, key = name.split(".")
        for part in path:
            module = module._modules.setdefault(part, nn.Module())  # type: ignore[assignment]
        if kind == "parameter":
            module._parameters[key] = tensor  # type: ignore[assignment]
            return
        module._buffers[key] = tensor
        if kind == "constant":
            module._non_persistent_buffers_set.add(key)

    @property
    def graph(self) -> Graph:
        """The graph with the tensors as they are now."""
        return replace(self._graph, tensors={name: tensor.detach() for name, tensor in self._tensors().items()})

    def _tensors(self) -> dict[str, Tensor]:
        known = {**dict(self.named_parameters(remove_duplicate=False)), **dict(self.named_buffers(remove_duplicate=False))}
        return {name: known[name] for name in self._graph.kinds}

    def forward(self, *inputs: Tensor, **named: Tensor) -> Any:
        inputs = in_order(self._graph, inputs, named)
        check_inputs(self._graph, inputs)
        return execute(self._graph, inputs, self._tensors(), over=self._over)


# ---- writing


def save(path: Path, graph: Graph, about: About, values: Values = "float32") -> int:
    """Write a packed file, whole or not at all, and read it back to see that it is right. Returns its size in bytes."""
    content = pack(graph, about, values)
    again = unpack(content).graph
    for name, tensor in graph.tensors.items():
        if not same_bits(again.tensors[name], rounded(tensor, graph.kinds[name], values)):
            raise AssertionError(f"{name} was not read back as it was written")
    with atomic_write(path) as partial:
        partial.write_bytes(content)
    return len(content)


def pack(graph: Graph, about: About, values: Values = "float32") -> bytes:
    """The bytes of a packed file."""
    table, blobs = [], []
    for name, tensor in graph.tensors.items():
        entry, parts = pack_tensor(name, tensor, narrow(tensor, graph.kinds[name], values))
        table.append(entry)
        blobs += parts
    body = b"".join(blobs)
    header = {
        "graph": to_json(graph),
        "tensors": table,
        "about": asdict(about),
        "sha256": hashlib.sha256(body).hexdigest(),
    }
    text = json.dumps(header, separators=(",", ":"), allow_nan=False).encode()
    return PREFIX.pack(MAGIC, VERSION, len(text), hashlib.sha256(text).digest()) + text + body


def narrow(tensor: Tensor, kind: str, values: Values) -> bool:
    """Is this a weight that is written as bfloat16?"""
    return values == "bfloat16" and kind == "parameter" and tensor.ndim >= 2 and tensor.dtype == torch.float32


def rounded(tensor: Tensor, kind: str, values: Values) -> Tensor:
    return tensor.to(torch.bfloat16).to(tensor.dtype) if narrow(tensor, kind, values) else tensor


def pack_tensor(name: str, tensor: Tensor, as_bfloat16: bool) -> tuple[dict[str, Any], list[bytes]]:
    """A row of the table, and the blobs."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    if dtype not in DTYPES or tensor.layout != torch.strided or tensor.is_quantized:
        raise PackedError(f"{name} is a {tensor.layout} tensor of {tensor.dtype}; a packed file holds plain tensors of numbers")
    words, stored = as_words(tensor), as_words(tensor.to(torch.bfloat16) if as_bfloat16 else tensor)
    kept = words.any(1)
    gaps = np.diff(np.flatnonzero(kept), prepend=-1) - 1
    count, k = len(gaps), best_rice(gaps)
    quotients, remainders, left = *write_rice(gaps, k), stored[kept].tobytes()
    entry = {"name": name, "dtype": dtype, "shape": list(tensor.shape), "stored": "bfloat16" if as_bfloat16 else dtype}
    if len(quotients) + len(remainders) + len(left) >= stored.nbytes:
        return {**entry, "mask": None}, [stored.tobytes()]
    return {**entry, "mask": [count, k, len(quotients)]}, [quotients, remainders, left]


def as_words(tensor: Tensor) -> np.ndarray:
    """The tensor's elements as unsigned integers, a row for each: of one column, or of two where an element has 16 bytes."""
    size = min(tensor.element_size(), 8)
    raw = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
    return raw.view(f"<u{size}").reshape(-1, tensor.element_size() // size)


def best_rice(gaps: np.ndarray) -> int:
    """The k with the shortest code: with rising k its length falls, then rises."""

    def bits(k: int) -> int:
        return int((gaps >> k).sum()) + len(gaps) * (k + 1)

    k = 0
    while k < 31 and bits(k + 1) < bits(k):
        k += 1
    return k


def write_rice(gaps: np.ndarray, k: int) -> tuple[bytes, bytes]:
    """The quotients and the remainders of gaps ≥ 0, as bits."""
    ones = np.cumsum((gaps >> k) + 1) - 1
    unary = np.zeros(int(ones[-1]) + 1 if len(ones) else 0, np.uint8)
    unary[ones] = 1
    remainders = (gaps[:, None] >> np.arange(k)[::-1]) & 1
    return np.packbits(unary).tobytes(), np.packbits(remainders.astype(np.uint8)).tobytes()


# ---- reading


def load(path: str | Path) -> Packed:
    """The model of a packed file, or PackedError. Nothing that the file says is believed before it is checked."""
    path = Path(path)
    if path.is_dir():
        raise PackedError(f"{path} is a folder; expected a packed file, as `optg export` writes it")
    try:
        return unpack(path.read_bytes())
    except (GraphError, PackedError) as error:
        raise PackedError(f"{path}: {error}") from None


def unpack(content: bytes) -> Packed:
    require(sys.byteorder == "little", "packed files can be read on little-endian machines only")
    require(content[: len(MAGIC)] == MAGIC, "not a packed model: it does not begin as one")
    require(len(content) >= PREFIX.size, "the file is cut off in its first bytes")
    _, version, length, digest = PREFIX.unpack_from(content)
    require(version == VERSION, f"the file is of version {version}; this optg reads version {VERSION}")
    require(length <= len(content) - PREFIX.size, "the file is cut off in its header")
    text = content[PREFIX.size : PREFIX.size + length]
    require(hashlib.sha256(text).digest() == digest, "the header is damaged: its checksum differs")
    body = memoryview(content)[PREFIX.size + length :]
    header = read_json(text)
    require(
        type(header) is dict and set(header) == {"graph", "tensors", "about", "sha256"}, "the header lacks a part, or has more"
    )
    about = read_about(header["about"])
    rows = read_table(header["tensors"], len(body), max(ALWAYS_FINE, LARGEST_RATIO * len(content)))
    require(header["sha256"] == hashlib.sha256(body).hexdigest(), "the tensors are damaged: their checksum differs")
    tensors, start = {}, 0
    for row in rows:
        tensors[row.name] = row.read(body[start : start + row.length])
        start += row.length
    try:
        graph = from_json(header["graph"], tensors)
        check_sizes(graph)
    except RecursionError:
        raise PackedError("the graph's arguments are nested too deep") from None
    return Packed(graph, about)


def require(fine: bool, problem: str) -> None:
    if not fine:
        raise PackedError(problem)


def read_json(text: bytes) -> Any:
    def pairs(found: list[tuple[str, Any]]) -> dict[str, Any]:
        require(len(dict(found)) == len(found), "the header has a field twice")
        return dict(found)

    def not_a_number(text: str) -> None:
        raise PackedError(f"the header has the number {text}")

    try:
        return json.loads(text.decode(), object_pairs_hook=pairs, parse_constant=not_a_number)
    except RecursionError:
        raise PackedError("the header is nested too deep") from None
    except PackedError:
        raise
    except ValueError as error:  # not UTF-8, not JSON, or a number of thousands of digits
        raise PackedError(f"the header is not JSON: {error}") from None


def is_name(value: Any) -> bool:
    return type(value) is str and 0 < len(value) <= 1000 and value.isprintable()


def is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**62


def is_shape(value: Any) -> bool:
    if type(value) is not list or len(value) > 24 or not all(map(is_count, value)):
        return False
    return math.prod(max(1, n) for n in value) < 2**62


def read_about(data: Any) -> About:
    known = {f.name for f in fields(About)}
    require(
        type(data) is dict and set(data) == known, f"what the header says about the model is not {', '.join(sorted(known))}"
    )
    require(is_name(data["name"]), "the model's name is none")
    require(is_count(data["classes"]), "the number of classes is none")
    shape = data["shape"]
    require(is_shape(shape) and len(shape) > 0, "the image's shape is none")
    for key in ("mean", "std"):
        numbers = data[key] is None or (type(data[key]) is list and len(data[key]) == shape[0] and all(map(is_real, data[key])))
        require(numbers, f"the {key} is not a number for each of {shape[0]} channels")
    require(data["std"] is None or all(value > 0 for value in data["std"]), "a channel's std is not above 0")
    require(is_real(data["centre"]) and 0 < data["centre"] <= 1, "the centre is not above 0 and at most 1")
    labels = data["labels"]
    named = labels is None or (type(labels) is list and len(labels) == data["classes"] and all(map(is_name, labels)))
    require(named, f"the labels are not a name for each of {data['classes']} classes")
    account, origin = data["account"], data["origin"]
    require(
        type(account) is dict and all(map(is_name, account)) and all(map(is_count, account.values())), "the account is none"
    )
    plain = type(origin) is dict and all(map(is_name, origin)) and all(map(is_plain, origin.values()))
    require(plain, "the origin is not a dict of plain values")
    values: dict[str, Any] = {key: tuple(value) if type(value) is list else value for key, value in data.items()}
    return About(**values)


def is_real(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) < 1e30


def is_plain(value: Any) -> bool:
    return value is None or type(value) is bool or is_real(value) or (type(value) is str and value.isprintable())


@dataclass(frozen=True)
class Row:
    """A tensor as the table describes it, checked."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    stored: torch.dtype
    mask: tuple[int, int, int] | None  # values, k, bytes of the quotients

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def parts(self) -> tuple[int, int, int]:
        """Bytes of the quotients, the remainders and the values."""
        if self.mask is None:
            return 0, 0, self.size * self.stored.itemsize
        count, k, quotients = self.mask
        return quotients, (count * k + 7) // 8, count * self.stored.itemsize

    @property
    def length(self) -> int:
        return sum(self.parts)

    def read(self, blob: memoryview) -> Tensor:
        quotients, remainders, _ = self.parts
        values = np.frombuffer(blob[quotients + remainders :], np.uint8)
        if self.stored == torch.bool:
            require(bool((values <= 1).all()), f"{self.name} has truth values that are neither")
        if self.mask is None:
            words = values.copy()
        else:
            count, k, _ = self.mask
            at = read_rice(self.name, count, k, blob[:quotients], blob[quotients : quotients + remainders])
            require(count == 0 or int(at[-1]) < self.size, f"the mask of {self.name} is longer than its {self.size} weights")
            kind = np.dtype("c16" if self.stored.itemsize == 16 else f"u{self.stored.itemsize}")
            scattered = np.zeros(self.size, kind)
            scattered[at] = values.view(kind)
            words = scattered.view(np.uint8)
        if self.size == 0:
            return torch.empty(self.shape, dtype=self.dtype)
        return torch.from_numpy(words).view(self.stored).to(self.dtype).reshape(self.shape)


def read_table(data: Any, room: int, limit: int) -> list[Row]:
    """The rows, whose blobs fill the room exactly and which unfold to no more than the limit; nothing is allocated yet."""
    require(type(data) is list, "the table of tensors is not a list")
    rows = []
    for entry in data:
        known = type(entry) is dict and set(entry) == {"name", "dtype", "shape", "stored", "mask"}
        require(known and is_name(entry["name"]), "a row of the table is not name, dtype, shape, stored and mask")
        name, shape, mask = entry["name"], entry["shape"], entry["mask"]
        for key in ("dtype", "stored"):
            require(type(entry[key]) is str and entry[key] in DTYPES, f"{name} has an unknown {key}")
        require(entry["stored"] in (entry["dtype"], "bfloat16"), f"{name} is stored as {entry['stored']}")
        require(entry["stored"] == entry["dtype"] or entry["dtype"] == "float32", f"{name} is stored as {entry['stored']}")
        require(is_shape(shape), f"{name} has a shape that is none")
        if mask is not None:
            fine = type(mask) is list and len(mask) == 3 and all(map(is_count, mask)) and mask[1] < 32
            require(fine and mask[0] <= math.prod(shape) and mask[2] <= room, f"the mask of {name} claims what cannot be")
        row = Row(name, DTYPES[entry["dtype"]], tuple(shape), DTYPES[entry["stored"]], tuple(mask) if mask else None)
        rows.append(row)
    require(len({row.name for row in rows}) == len(rows), "the table has a name twice")
    unfolded = sum(row.size * row.dtype.itemsize for row in rows)
    require(unfolded <= limit, f"the tensors would unfold to {unfolded:,} bytes; at most {limit:,} are believed of such a file")
    total = sum(row.length for row in rows)
    require(total == room, f"the tensors take {total:,} bytes, but {room:,} follow the header")
    return rows


def read_rice(name: str, count: int, k: int, quotients: memoryview, remainders: memoryview) -> np.ndarray:
    """Where the values are, in rising order."""
    ones = np.flatnonzero(np.unpackbits(np.frombuffer(quotients, np.uint8)))
    require(len(ones) == count, f"the mask of {name} has {len(ones)} places for {count} values")
    require(len(quotients) == (int(ones[-1]) // 8 + 1 if count else 0), f"the mask of {name} goes on after its end")
    gaps = (np.diff(ones, prepend=-1) - 1) << k
    if k:
        bits = np.unpackbits(np.frombuffer(remainders, np.uint8), count=count * k).reshape(count, k)
        for bit in range(k):
            gaps += bits[:, bit].astype(np.int64) << (k - 1 - bit)
    return np.cumsum(gaps + 1) - 1


def check_sizes(graph: Graph) -> None:
    """Does every operation fit its arguments, and stay within reason? Found without computing anything."""
    for name, shape, dtype in zip(graph.inputs, graph.shapes, graph.dtypes):
        size = math.prod(n or 1 for n in shape) * dtype.itemsize
        require(len(shape) <= 24 and size <= LARGEST_VALUE, f"the input {name!r} would be of {size:,} bytes for one image")
    for name, value in dry_run(graph).items():
        for part in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(part, Tensor):
                size = part.numel() * part.element_size()
                require(size <= LARGEST_VALUE, f"the node {name!r} would make {size:,} bytes of one image")


def same_bits(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and bool((as_words(a) == as_words(b)).all())
