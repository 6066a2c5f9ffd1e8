"""The structs of engine.c, field by field."""

import contextlib
import ctypes
import mmap
from ctypes import Structure, c_float, c_int64, c_void_p
from typing import Any

import numpy as np

CONVOLUTION, POOL_MAX, POOL_MEAN, MEAN, COPY, ADD, MUL, SOFTMAX = range(8)
ARENA, HANDED_IN = 1, 2  # buffers of a view; what the caller hands in comes from HANDED_IN on


class View(Structure):
    _fields_ = [(name, c_int64) for name in ("buffer", "start", "row", "channel", "pass_", "group")]


class HaloTable(Structure):
    _fields_ = [("edges", c_void_p), ("count", c_int64), ("masks", c_void_p), ("fill", c_float)]


SHORT = ("rows", "columns", "shared", "single", "first", "last")
TILE = np.dtype([*((n, "i8") for n in ("in", "out", "add")), *((n, "i4") for n in SHORT), ("filters", "i8")])
SIDES = 9  # (all rows, all but the first, all but the last) × the same for columns
FILTER = np.dtype([("taps", "u8"), ("count", "i8"), ("channel", "i8"), ("width", "i8"), ("framed", "i4", SIDES + 1)])


class Step(Structure):
    _fields_ = [
        ("kind", c_int64), ("channels", c_int64),
        ("in_", View), ("add", View), ("out", View),
        ("rows", c_int64), ("columns", c_int64),
        ("activation", c_int64), ("low", c_float), ("high", c_float), ("slope", c_float), ("scale", c_float),
        ("finish", HaloTable),
        ("tiles", c_void_p), ("filters", c_void_p), ("cost", c_void_p), ("bias", c_void_p),
        ("tile_count", c_int64), ("filter_count", c_int64),
        ("stride_row", c_int64), ("stride_column", c_int64), ("filters_outside", c_int64),
        ("strips", c_void_p), ("strip_count", c_int64), ("chained", c_int64),
        ("window_rows", c_int64), ("window_columns", c_int64), ("dilation_row", c_int64), ("dilation_column", c_int64),
        ("weights", c_void_p),
        ("moves", c_void_p), ("move_count", c_int64), ("fill_count", c_int64),
        ("images", c_int64), ("lanes", c_int64),
    ]  # fmt: skip

    def keep(self, field: str, array: np.ndarray) -> None:
        """Point a field at an array, which lives as long as the step, or until the field points elsewhere."""
        setattr(self, field, array.ctypes.data)
        self.__dict__.setdefault("kept", {})[field] = array

    def finish_with(self, edges: np.ndarray, masks: np.ndarray, fill: float) -> None:
        """Fill the output's halo so."""
        self.finish = HaloTable(edges.ctypes.data, len(edges), masks.ctypes.data, fill)
        self.__dict__.setdefault("kept", {})["finish"] = (edges, masks)


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
    """So many zeroed bytes, and the address in them that is a multiple of the alignment."""
    memory = np.zeros(size + alignment, np.uint8)
    return memory, -(-memory.ctypes.data // alignment) * alignment


def arena(size: int) -> tuple[Any, int]:
    """Memory for a thread's values, in huge pages where the system has them: a layer touches many planes at once."""
    huge = 1 << 21
    memory = mmap.mmap(-1, size + huge)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    return memory, -(-start // huge) * huge
