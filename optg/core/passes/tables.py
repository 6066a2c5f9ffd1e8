"""Tables that tell a Triton kernel where the tensors of all layers are, so that one launch sweeps over all of them."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

BLOCK = 1 << 13  # entries of one program
WIDE = 16  # words of this many bytes are loaded if all addresses and lengths are multiples of it

CACHE: dict[Any, Tensor] = {}  # small tensors that depend on layer shapes and device only


class Table(NamedTuple):
    blocks: Tensor  # layer, start and length of each program's block
    addresses: Tensor  # address of each layer's first entry, one row per list
    align: int  # a divisor of all addresses and lengths


class Tables:
    """Makes tables and caches them by address: parameters, masks and latent weights stay in place, and gradients mostly do."""

    KEPT = 16  # recently used tables, besides those that CUDA graphs use
    SPARE = 3  # tables of one shape that a capture can make

    def __init__(self) -> None:
        self.tables: dict[Any, Table] = {}
        self.spare: dict[Any, list[Tensor]] = {}  # pinned tensors by shape: none can be allocated during a capture
        self.captured: list[Any] = []  # what graphs read at each replay

    def __call__(self, *lists: Sequence[Tensor]) -> Table | None:
        """Return the table of parallel lists of tensors; None if kernels cannot sweep over them."""
        capturing = lists[0][0].is_cuda and torch.cuda.is_current_stream_capturing()
        key = (len(lists), *((t.data_ptr(), t.dtype, t.shape, t.stride()) for tensors in lists for t in tensors))
        known = self.tables.pop(key, None)
        table = known or self.make(lists, capturing)
        if table is None:
            return None
        if known or not capturing:  # a table made during a capture is filled only when that graph is replayed
            self.tables[key] = table
            if len(self.tables) > self.KEPT:
                self.tables.pop(next(iter(self.tables)))
        if capturing:
            self.captured.append(table)
        return table

    def make(self, lists: Sequence[Sequence[Tensor]], capturing: bool) -> Table | None:
        sizes, shape = tuple(t.numel() for t in lists[0]), (len(lists), len(lists[0]))
        device = lists[0][0].device
        if capturing and (not self.spare.get(shape) or (sizes, device) not in CACHE):  # no eager step came before
            return None
        if not all(same_layout(tensors) for tensors in zip(*lists)):
            return None
        if any(len({t.dtype for t in tensors}) > 1 for tensors in lists):
            return None
        if (sizes, device) not in CACHE:
            CACHE[sizes, device] = torch.from_numpy(split(np.array(sizes))).to(device)
        found = np.array([[t.data_ptr() for t in tensors] for tensors in lists])
        wide = not (found % WIDE).any() and not any(size % WIDE for size in sizes)
        addresses = torch.from_numpy(found)
        if capturing:
            addresses = self.spare[shape].pop().copy_(addresses)
            self.captured.append(addresses)
        elif device.type == "cuda" and len(spare := self.spare.setdefault(shape, [])) < self.SPARE:
            spare.append(addresses.pin_memory())
        return Table(CACHE[sizes, device], addresses.to(device, non_blocking=True), WIDE if wide else 1)


def same_layout(tensors: Sequence[Tensor]) -> bool:
    """Return whether the tensors are dense in memory and order their dimensions alike."""
    first, expected = tensors[0], 1
    if any(t.shape != first.shape for t in tensors):
        return False
    if all(t.is_contiguous() for t in tensors):
        return True
    for stride, size in sorted(zip(first.stride(), first.shape)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return all(t.stride() == first.stride() for t in tensors)


def split(sizes: np.ndarray) -> np.ndarray:
    """Return the layer, start and length of each program's block."""
    programs = -(-sizes // BLOCK)
    layers = np.repeat(np.arange(len(sizes)), programs)
    starts = (np.arange(len(layers)) - np.repeat(programs.cumsum() - programs, programs)) * BLOCK
    return np.stack([layers, starts, np.minimum(BLOCK, sizes[layers] - starts)])


def filters(shapes: Sequence[torch.Size], device: torch.device) -> Tensor:
    """Return the layer, start and length of each filter, as blocks of a table."""
    key = (*shapes, device)
    if key not in CACHE:
        sizes = [(layer, shape[0], shape[1:].numel()) for layer, shape in enumerate(shapes)]
        rows = [(layer, i * inner, inner) for layer, count, inner in sizes for i in range(count)]
        CACHE[key] = torch.tensor(rows, device=device).T.contiguous()
    return CACHE[key]


def first_filters(shapes: Sequence[torch.Size], device: torch.device) -> Tensor:
    """Return for each layer the number of its first filter, counted over all layers, and the size of a filter."""
    key = ("first", *shapes, device)
    if key not in CACHE:
        counts = np.array([shape[0] for shape in shapes])
        inner = np.array([shape[1:].numel() for shape in shapes])
        CACHE[key] = torch.from_numpy(np.stack([counts.cumsum() - counts, inner])).to(device)
    return CACHE[key]


def output_neurons(tensors: Sequence[Tensor], factors: Sequence[Tensor]) -> Tensor | None:
    """Return where kernels find the factor of an entry's output neuron; None if they cannot use these factors.

    Per tensor: the address of its factors, then stride and size of the outer and of the inner dimension that tell neurons
    apart.
    """
    key = ("neurons", *((t.shape, t.stride(), f.data_ptr(), f.shape) for t, f in zip(tensors, factors)))
    if key not in CACHE:
        capturing = tensors[0].is_cuda and torch.cuda.is_current_stream_capturing()
        if capturing or any(f.dtype != torch.float32 for f in factors):  # a capture may not copy from the host
            return None
        rows = []
        for tensor, factor in zip(tensors, factors):
            dims = [(tensor.stride(d), factor.shape[d]) for d in range(tensor.ndim) if factor.shape[d] > 1]
            (outer, outer_size), (inner, inner_size) = [(1, 1)] * (2 - len(dims)) + dims
            rows.append([factor.data_ptr(), outer, outer_size, inner, inner_size])
        CACHE[key] = torch.tensor(rows, device=tensors[0].device).T.contiguous()
    return CACHE[key]


def index_maps(tensors: Sequence[Tensor], each: bool) -> Tensor | None:
    """Return the numbers that turn a place in memory into a logical index; None for layouts that have none.

    Memory holds a tensor as (rows, plane, inner) while indices count (rows, inner, plane). Per tensor: the sizes of plane and
    inner, and its first index, which is 0 if each tensor is ranked by itself.
    """
    device = tensors[0].device
    key = ("index", each, *((t.shape, t.stride()) for t in tensors), device)
    if key not in CACHE:
        sizes = [plane_and_inner(t) for t in tensors]
        if None in sizes:
            return None
        first = np.array([0 if each else t.numel() for t in tensors])
        CACHE[key] = torch.from_numpy(np.array([*zip(*sizes), first.cumsum() - first])).to(device)
    return CACHE[key]


def plane_and_inner(tensor: Tensor) -> tuple[int, int] | None:
    if tensor.is_contiguous():
        return 1, max(1, tensor.numel())
    if tensor.ndim == 2 and tensor.T.is_contiguous():
        return tensor.shape[1], tensor.shape[0]
    if tensor.ndim > 2 and tensor.movedim(1, -1).is_contiguous():  # channels_last
        return tensor.shape[2:].numel(), tensor.shape[1]
    return None


def lines_along(structure: Any, weights: Sequence[Tensor], axes: Sequence[Any]) -> Tensor | None:
    """Return per tensor the stride of its input dimension, and the entries from one slice of outputs to the next."""
    numbers = [(w.stride(a.input), w.stride(a.input) * w.shape[a.input]) for w, a in zip(weights, axes)]
    return on_device(numbers, weights)


class Blocks(NamedTuple):
    numbers: Tensor  # see `unit_kernels`
    shapes: list[list[int]]  # of the units of each layer
    programs: Tensor  # blocks of units, as in a table


def blocks_of(structure: Any, weights: Sequence[Tensor], axes: Sequence[Any]) -> Blocks | None:
    """Return where units are; None for units that are no blocks in three dimensions."""
    rows, grids = [], []
    for weight, axis in zip(weights, axes):
        if (grid := structure.grid(weight.shape, axis)) is None:
            return None
        full, units, tile = grid
        grids.append(units)
        dims = joined_dims(full, weight.view(full).stride(), tile)
        if len(dims) > 3:
            return None
        size = math.prod(side for _, side, _, _ in dims)
        rows.append([*((1, 1, 0, 1) * (3 - len(dims))), *(number for dim in dims for number in dim), size])
    numbers = on_device(rows, weights)
    shapes = [list(structure.unit_shape(weight.shape, axis)) for weight, axis in zip(weights, axes)]
    programs = torch.from_numpy(split(np.array([math.prod(grid) for grid in grids]))).to(weights[0].device)
    return Blocks(numbers, shapes, programs) if numbers is not None else None


def joined_dims(shape: Sequence[int], strides: Sequence[int], tile: Sequence[int]) -> list[tuple[int, int, int, int]]:
    """Return the units along each dimension, their side, its stride and length, with dimensions joined where possible."""
    dims: list[tuple[int, int, int, int]] = []
    for length, stride, side in zip(shape, strides, tile):
        if length == 1:
            continue
        if dims and dims[-1][1] == side == 1 and dims[-1][2] == stride * length:
            length *= dims.pop()[3]
        dims.append((-(-length // side), side, stride, length))
    return dims


def on_device(rows: list[Any], like: Sequence[Tensor]) -> Tensor | None:
    """Return numbers of each tensor, as rows; None if they or the places in a tensor need more than 32 bits."""
    small = all(tensor.numel() < 1 << 30 for tensor in like)
    return torch.tensor(rows, dtype=torch.int32, device=like[0].device).T.contiguous() if small else None
