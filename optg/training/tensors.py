"""Read and write safetensors files, hashing each byte on its way.

The safetensors package maps files into memory and hides the cause of an I/O error. Here a read error stays an OSError, and only
what cannot be parsed is damage. Files have the same bytes as the package's own.
"""

import json
import math
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from optg.files import Fingerprint, HashedFile, open_regular
from optg.training.errors import DamagedFile

NAMES = {  # in the order in which files store them, largest items last; see `layout`
    "bool": "BOOL", "uint8": "U8", "int8": "I8", "float8_e5m2": "F8_E5M2", "float8_e4m3fn": "F8_E4M3", "int16": "I16",
    "uint16": "U16", "float16": "F16", "bfloat16": "BF16", "int32": "I32", "uint32": "U32", "float32": "F32",
    "complex64": "C64", "float64": "F64", "int64": "I64", "uint64": "U64",
}  # fmt: skip
DTYPES: dict[str, torch.dtype] = {short: getattr(torch, long) for long, short in NAMES.items()}
SHORT = {dtype: short for short, dtype in DTYPES.items()}
ORDER = list(DTYPES.values())


def write_tensors(file: HashedFile, tensors: dict[str, Tensor], facts: dict[str, str] | None = None) -> None:
    """Write tensors, and facts for the header, as a safetensors file."""
    ordered = sorted(tensors.items(), key=lambda item: (-ORDER.index(item[1].dtype), item[0].encode()))
    header: dict[str, Any] = {"__metadata__": facts} if facts else {}
    end = 0
    for name, tensor in ordered:
        start, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": SHORT[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)  # aligns the tensors
    file.write(len(text).to_bytes(8, "little") + text)
    for _, tensor in ordered:
        file.write(raw_bytes(tensor.detach().cpu().contiguous()))


def read_tensors(path: Path) -> tuple[dict[str, Tensor], Fingerprint]:
    """Return the tensors of a safetensors file and the file's fingerprint, or raise DamagedFile if it cannot be parsed."""
    with open_regular(path) as opened:
        size, file = os.fstat(opened.fileno()).st_size, HashedFile(opened)
        length = int.from_bytes(read_exactly(file, 8, path), "little")
        if length > size - 8:
            raise DamagedFile(f"{path} is damaged: it ends within its header")
        try:
            entries = parse_header(read_exactly(file, length, path), size - 8 - length)
            tensors = {name: torch.empty(shape, dtype=dtype) for name, dtype, shape in entries}
        except (ValueError, KeyError, TypeError, RecursionError, RuntimeError) as error:
            raise DamagedFile(f"{path} is damaged: its header is not valid: {error}") from None
        for tensor in tensors.values():
            buffer = raw_bytes(tensor)
            if file.readinto(buffer) != len(buffer):
                raise DamagedFile(f"{path} is damaged: it was cut off")
    return tensors, file.fingerprint


def parse_header(text: bytes, size: int) -> list[tuple[str, torch.dtype, list[int]]]:
    """Return name, type and shape of each tensor in the order of the file. Together they must fill `size` bytes."""
    header = dict(json.loads(text))
    header.pop("__metadata__", None)
    entries, end = [], 0
    for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        dtype, shape, offsets = DTYPES[entry["dtype"]], entry["shape"], entry["data_offsets"]
        if not all(type(n) is int and n >= 0 for n in shape) or type(name) is not str:
            raise ValueError(f"{name!r} has the shape {shape}")
        start, end = end, end + math.prod(shape) * dtype.itemsize
        if offsets != [start, end]:
            raise ValueError(f"{name!r} is at {offsets} instead of {[start, end]}")
        entries.append((name, dtype, shape))
    if end != size:
        raise ValueError(f"it describes {end} bytes of {size}")
    return entries


def read_exactly(file: HashedFile, count: int, path: Path) -> bytes:
    data = bytearray(count)
    if file.readinto(memoryview(data)) != count:
        raise DamagedFile(f"{path} is damaged: it was cut off")
    return bytes(data)


def raw_bytes(tensor: Tensor) -> memoryview:
    """Return the memory of a contiguous tensor."""
    return tensor.reshape(-1).view(torch.uint8).numpy().data if tensor.numel() else memoryview(bytearray())
