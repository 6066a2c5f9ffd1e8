"""Write and read packed files."""

import hashlib
import json
import math
import struct
import sys
from dataclasses import asdict
from pathlib import Path

from optg.deploy.graph import IMAGE, Graph, GraphError, LimitExceeded, Limits, check_weights, from_json, to_json
from optg.deploy.packed.checks import PackedError, TooLarge, require
from optg.deploy.packed.header import About, parse_about, parse_json
from optg.deploy.packed.model import PackedModel
from optg.deploy.packed.tensors import Values, pack_tensor, parse_table, round_as_stored, same_bits, stored_as_bfloat16
from optg.files import atomic_write, naming, read_bytes

MAGIC = b"\x93optg\r\n\x1a"
VERSION = 1
PREFIX = struct.Struct("<8sIQ32s")
HEADER_FIELDS = {"graph", "tensors", "about", "sha256"}

# Limits on what a file may unpack to. A model with 99.9 % zeros is up to 1,000 times larger than its file.
LARGEST_RATIO, ALWAYS_ALLOWED = 1024, 2**28


def write_packed(path: Path, graph: Graph, about: About, values: Values = "float32") -> int:
    """Write a packed file atomically, after checking that it is read back correctly. Return its size in bytes."""
    content = pack(graph, about, values)
    read_back = unpack(content, Limits(float("inf"))).graph
    for name, tensor in graph.tensors.items():
        if not same_bits(read_back.tensors[name], round_as_stored(tensor, graph.kinds[name], values)):
            raise AssertionError(f"{name} was not read back as it was written")
    with atomic_write(path) as partial, naming(path):
        partial.write_bytes(content)
    return len(content)


def pack(graph: Graph, about: About, values: Values = "float32") -> bytes:
    """Return the bytes of a packed file."""
    table, blobs = [], []
    for name, tensor in graph.tensors.items():
        row, parts = pack_tensor(name, tensor, stored_as_bfloat16(tensor, graph.kinds[name], values))
        table.append(row)
        blobs += parts
    body = b"".join(blobs)
    header = {
        "graph": to_json(graph),
        "tensors": table,
        "about": asdict(about),
        "sha256": hashlib.sha256(body).hexdigest(),
    }
    try:
        text = json.dumps(header, separators=(",", ":"), allow_nan=False).encode()
    except ValueError:
        raise PackedError(
            "the model's description holds a number that is not finite; check the accuracy in summary.json"
        ) from None
    return PREFIX.pack(MAGIC, VERSION, len(text), hashlib.sha256(text).digest()) + text + body


def load(path: str | Path, *, limits: float | None = None) -> PackedModel:
    """Return the model in a packed file. Raise PackedError if any of the file's contents fails a check.

    Args:
        limits: multiply the limits on memory, work and sizes by this factor, for a large model that you trust. By default
            $OPTG_LIMITS, or 1.
    """
    path = Path(path)
    if path.is_dir():
        raise PackedError(f"{path} is a folder; expected a packed file as written by `optg export`")
    try:
        return unpack(read_bytes(path), Limits.of(limits))
    except MemoryError:
        raise TooLarge(f"{path}: not enough memory to load the model") from None
    except LimitExceeded as error:
        raise TooLarge(f"{path}: {error}") from None
    except (GraphError, PackedError) as error:
        raise PackedError(f"{path}: {error}") from None


def unpack(content: bytes, limits: Limits | None = None) -> PackedModel:
    """Return the model in the bytes of a packed file."""
    limits = (limits or Limits()).for_file(len(content))
    require(sys.byteorder == "little", "packed files can only be read on little-endian machines")
    require(content[: len(MAGIC)] == MAGIC, "not a packed model: the first bytes differ")
    require(len(content) >= PREFIX.size, "the file is truncated in its first bytes")
    _, version, length, digest = PREFIX.unpack_from(content)
    require(version == VERSION, f"the file has version {version}; this optg reads version {VERSION}")
    require(length <= len(content) - PREFIX.size, "the file is truncated in its header")
    text = content[PREFIX.size : PREFIX.size + length]
    require(hashlib.sha256(text).digest() == digest, "the header is damaged: its checksum differs")
    body = memoryview(content)[PREFIX.size + length :]
    header = parse_json(text)
    complete = type(header) is dict and set(header) == HEADER_FIELDS
    require(complete, f"the header must have exactly the fields {', '.join(sorted(HEADER_FIELDS))}")
    about = parse_about(header["about"])
    limits.require(4 * math.prod(about.shape), IMAGE, "an image of the header's shape takes … bytes")
    rows = parse_table(header["tensors"], len(body))
    unpacked = sum(row.size * row.dtype.itemsize for row in rows)
    limits.require(unpacked, max(ALWAYS_ALLOWED, LARGEST_RATIO * len(content)), "the tensors would unpack to … bytes")
    total = sum(row.length for row in rows)
    require(total == len(body), f"the tensors take {total:,} bytes, but {len(body):,} follow the header")
    require(header["sha256"] == hashlib.sha256(body).hexdigest(), "the tensors are damaged: their checksum differs")
    try:
        graph = from_json(header["graph"], {row.name: row.without_memory() for row in rows}, limits)
    except RecursionError:
        raise PackedError("the graph's arguments are nested too deeply") from None
    start = 0
    for row in rows:
        graph.tensors[row.name] = row.unpack_blob(body[start : start + row.length])
        start += row.length
    check_weights(graph)
    return PackedModel(graph, about)
