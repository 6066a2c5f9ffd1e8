"""Tensors in a packed file: a row in the header's table, and a blob with mask and values."""

import math
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from optg.deploy.graph import DTYPES
from optg.deploy.packed.checks import PackedError, is_count, is_name, is_shape, require
from optg.deploy.packed.rice import LARGEST_K, best_rice_parameter, decode_rice, encode_rice, gaps_before

Values = Literal["float32", "bfloat16"]  # how weights are stored
ROW_FIELDS = {"name", "dtype", "shape", "stored", "mask"}


def stored_as_bfloat16(tensor: Tensor, kind: str, values: Values) -> bool:
    """Return whether this tensor is a weight that `values` rounds to bfloat16."""
    return values == "bfloat16" and kind == "parameter" and tensor.ndim >= 2 and tensor.dtype == torch.float32


def round_as_stored(tensor: Tensor, kind: str, values: Values) -> Tensor:
    """Return the tensor as it is read back."""
    return tensor.to(torch.bfloat16).to(tensor.dtype) if stored_as_bfloat16(tensor, kind, values) else tensor


def pack_tensor(name: str, tensor: Tensor, as_bfloat16: bool) -> tuple[dict[str, Any], list[bytes]]:
    """Return the tensor's row of the table and the parts of its blob."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    if dtype not in DTYPES or tensor.layout != torch.strided or tensor.is_quantized:
        raise PackedError(f"{name} is a {tensor.layout} tensor of {tensor.dtype}; a packed file holds dense tensors of numbers")
    words, stored = as_words(tensor), as_words(tensor.to(torch.bfloat16) if as_bfloat16 else tensor)
    kept = np.asarray(words.any(1))
    gaps = gaps_before(kept)
    count, k = len(gaps), best_rice_parameter(gaps)
    quotients, remainders, values = *encode_rice(gaps, k), stored[kept].tobytes()
    row = {"name": name, "dtype": dtype, "shape": list(tensor.shape), "stored": "bfloat16" if as_bfloat16 else dtype}
    if len(quotients) + len(remainders) + len(values) >= stored.nbytes:
        return {**row, "mask": None}, [stored.tobytes()]
    return {**row, "mask": [count, k, len(quotients)]}, [quotients, remainders, values]


def as_words(tensor: Tensor) -> np.ndarray:
    """Return the elements as unsigned integers, one row per element: one column, or two for elements of 16 bytes."""
    size = min(tensor.element_size(), 8)
    raw = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
    return raw.view(f"<u{size}").reshape(-1, tensor.element_size() // size)


def same_bits(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and bool((as_words(a) == as_words(b)).all())


@dataclass(frozen=True)
class TensorRow:
    """A checked row of the table."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    stored: torch.dtype
    mask: tuple[int, int, int] | None  # number of values, k, bytes of the quotients

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def part_lengths(self) -> tuple[int, int, int]:
        """Return the bytes of the quotients, the remainders and the values."""
        if self.mask is None:
            return 0, 0, self.size * self.stored.itemsize
        count, k, quotients = self.mask
        return quotients, (count * k + 7) // 8, count * self.stored.itemsize

    @property
    def length(self) -> int:
        return sum(self.part_lengths)

    def without_memory(self) -> Tensor:
        return torch.empty(self.shape, dtype=self.dtype, device="meta")

    def unpack_blob(self, blob: memoryview) -> Tensor:
        """Return the tensor stored in this blob."""
        quotients, remainders, _ = self.part_lengths
        values = np.frombuffer(blob[quotients + remainders :], np.uint8)
        if self.stored == torch.bool:
            require(bool((values <= 1).all()), f"tensor {self.name}: a bool is neither 0 nor 1")
        if self.mask is None:
            words = values.copy()
        else:
            count, k, _ = self.mask
            at = decode_rice(self.name, count, k, blob[:quotients], blob[quotients : quotients + remainders])
            in_range = count == 0 or int(at[-1]) < self.size
            require(in_range, f"tensor {self.name}: the mask is longer than its {self.size} elements")
            kind = np.dtype("c16" if self.stored.itemsize == 16 else f"u{self.stored.itemsize}")
            scattered = np.zeros(self.size, kind)
            scattered[at] = values.view(kind)
            words = scattered.view(np.uint8)
        if self.size == 0:
            return torch.empty(self.shape, dtype=self.dtype)
        return torch.from_numpy(words).view(self.stored).to(self.dtype).reshape(self.shape)


def parse_table(data: Any, blob_bytes: int) -> list[TensorRow]:
    """Check the table of tensors and return its rows."""
    require(type(data) is list, 'header: "tensors" must be a list')
    rows = [parse_row(entry, blob_bytes) for entry in data]
    require(len({row.name for row in rows}) == len(rows), "the table of tensors has a name twice")
    return rows


def parse_row(entry: Any, blob_bytes: int) -> TensorRow:
    valid = type(entry) is dict and set(entry) == ROW_FIELDS
    require(valid and is_name(entry["name"]), f"a row of the table of tensors must have the fields {sorted(ROW_FIELDS)}")
    name, dtype, shape, stored, mask = (entry[key] for key in ("name", "dtype", "shape", "stored", "mask"))
    for key in ("dtype", "stored"):
        require(type(entry[key]) is str and entry[key] in DTYPES, f"tensor {name}: unknown {key}")
    compatible = stored == dtype or (stored == "bfloat16" and dtype == "float32")
    require(compatible, f"tensor {name}: {dtype} cannot be stored as {stored}")
    require(is_shape(shape), f"tensor {name}: invalid shape")
    if mask is not None:
        valid = type(mask) is list and len(mask) == 3 and all(map(is_count, mask)) and mask[1] <= LARGEST_K
        require(valid and mask[0] <= math.prod(shape) and mask[2] <= blob_bytes, f"tensor {name}: impossible mask")
    return TensorRow(name, DTYPES[dtype], tuple(shape), DTYPES[stored], tuple(mask) if mask else None)
