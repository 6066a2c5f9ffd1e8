"""The structs of c/program.h and c/engine.c, field by field, and memory for C."""

import contextlib
import ctypes
import mmap
from ctypes import Structure, c_float, c_int64, c_void_p
from typing import Any

import numpy as np

ARENA, FIRST_TENSOR = 1, 2  # values of View.buffer; the caller's tensors are numbered from FIRST_TENSOR on


class View(Structure):
    _fields_ = [(name, c_int64) for name in ("buffer", "start", "row", "channel", "pass_", "group")]


class Halo(Structure):
    _fields_ = [("edges", c_void_p), ("count", c_int64), ("masks", c_void_p), ("fill", c_float)]


class Activation(Structure):
    _fields_ = [("function", c_int64), ("low", c_float), ("high", c_float), ("slope", c_float)]


class Step(Structure):
    _fields_ = [
        ("run", c_void_p), ("run_chain", c_void_p), ("chained", c_int64),
        ("in_", View), ("add", View), ("out", View),
        ("channels", c_int64), ("rows", c_int64), ("columns", c_int64),
        ("activation", Activation), ("halo", Halo), ("own", c_void_p),
    ]  # fmt: skip


class Section(Structure):
    _fields_ = [("steps", c_void_p), ("count", c_int64), ("passes", c_int64)]


class Run(Structure):
    _fields_ = [
        ("sections", c_void_p), ("section_count", c_int64),
        ("inputs", c_void_p), ("input_count", c_int64),
        ("arenas", c_void_p),
        ("first_group", c_int64), ("groups", c_int64), ("together", c_int64), ("times", c_void_p),
    ]  # fmt: skip


def pointers(addresses: list[int]) -> Any:
    return (c_void_p * max(1, len(addresses)))(*addresses)


def address(struct: Any) -> int:
    return ctypes.addressof(struct)


def aligned(size: int, alignment: int = 64) -> tuple[np.ndarray, int]:
    """Return zeroed memory and the first address in it, followed by `size` bytes, that is a multiple of the alignment."""
    memory = np.zeros(size + alignment, np.uint8)
    return memory, -(-memory.ctypes.data // alignment) * alignment


def vectors(array: np.ndarray) -> np.ndarray:
    """Return a copy that is aligned for vector loads."""
    array = np.ascontiguousarray(array)
    memory, address = aligned(array.nbytes)
    start = address - memory.ctypes.data
    result = memory[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    result[...] = array
    return result


def arena(size: int) -> tuple[Any, int]:
    """Return memory for a thread's values, and its address. Huge pages help: a layer touches many planes at once."""
    huge = 1 << 21
    try:
        memory = mmap.mmap(-1, size + huge)
    except OSError as error:
        raise MemoryError(f"not enough memory for {size:,} bytes") from error
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    return memory, -(-start // huge) * huge
