"""The passes over all weights that a step or a cut makes, each as one Triton kernel for all layers together.

A kernel finds its work in a table on the device: for each program the length of its block, the layer it is of, and the
address of the block in each list of tensors. So a pass is one launch, whatever the number of layers, and nothing is
compiled for a model. What moves the least memory is written here; `optg.weights` and `optg.ranking` say the same in torch.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK, STEP = 1 << 13, 1 << 11  # entries of one program, and how many of them it looks at together
WIDE = 16  # bytes: a block whose address is a multiple of it is loaded in words of that size
TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


class Table(NamedTuple):
    rows: Tensor  # length and layer of each program's block, then its address in each list
    align: int  # of all addresses, in bytes


class Tables:
    """Makes tables and keeps them: parameters, masks and latent weights stay where they are, and gradients mostly do."""

    KEPT = 16

    def __init__(self) -> None:
        self.tables: dict[Any, Table] = {}
        self.pinned: list[Tensor] = []  # memory that copies to the device may still read, or that graphs read at each replay
        self.spare: dict[tuple[int, ...], Tensor] = {}  # one of each shape: under capture none can be allocated

    def __call__(self, *lists: Sequence[Tensor]) -> Table | None:
        """The table of parallel lists of tensors; None where their blocks cannot be laid side by side."""
        key = tuple((t.data_ptr(), t.stride()) for tensors in lists for t in tensors)
        if key not in self.tables:
            if (found := rows(*lists)) is None:
                return None
            if len(self.tables) >= self.KEPT:
                self.tables.pop(next(iter(self.tables)))
            align = WIDE if not (found[2:] % WIDE).any() else 1
            self.tables[key] = Table(self.to_device(found, lists[0][0].device), align)
        return self.tables[key]

    def to_device(self, found: np.ndarray, device: torch.device) -> Tensor:
        if device.type != "cuda":
            return torch.from_numpy(found)
        capturing = torch.cuda.is_current_stream_capturing()
        pinned = self.spare.pop(found.shape) if capturing else torch.empty(found.shape, dtype=torch.int64, pin_memory=True)
        pinned.numpy()[:] = found
        if capturing:
            self.pinned.append(pinned)  # for as long as the graph may be replayed
        elif found.shape not in self.spare:
            self.spare[found.shape] = torch.empty(found.shape, dtype=torch.int64, pin_memory=True)
        return pinned.to(device, non_blocking=True)


def rows(*lists: Sequence[Tensor]) -> np.ndarray | None:
    """Length, layer, and the address in each list, of every program's block."""
    for tensors in zip(*lists):
        if len({(t.shape, t.stride()) for t in tensors}) > 1 or not dense(tensors[0]):
            return None
    sizes = np.array([t.numel() for t in lists[0]])
    programs = -(-sizes // BLOCK)
    layers = np.repeat(np.arange(len(sizes)), programs)
    starts = (np.arange(len(layers)) - np.repeat(programs.cumsum() - programs, programs)) * BLOCK
    addresses = [np.array([t.data_ptr() for t in tensors])[layers] + starts * tensors[0].itemsize for tensors in lists]
    return np.stack([np.minimum(BLOCK, sizes[layers] - starts), layers, *addresses])


def dense(tensor: Tensor) -> bool:
    """Does it fill its memory, in whatever order of dimensions?"""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def launch(kernel: Any, table: Table, *args: Any, **constants: Any) -> None:
    programs = table.rows.shape[1]
    if programs:
        with torch.cuda.device(table.rows.device) if table.rows.is_cuda else nullcontext():
            kernel[(programs,)](table.rows, programs, *args, ALIGN=table.align, BLOCK=BLOCK, STEP=STEP, **constants)


@triton.jit
def block(table, programs, LIST: tl.constexpr, TYPE: tl.constexpr, ALIGN: tl.constexpr):
    """The address of this program's block in a list."""
    address = tl.load(table + (2 + LIST) * programs + tl.program_id(0))
    return tl.multiple_of(address, ALIGN).to(tl.pointer_type(TYPE))


# ---- a step: removed weights are most of all, so only they are read and written


def fade(table: Table, dtype: torch.dtype, share: float = 0.0) -> None:
    """targets, masks: removed entries of the targets are left with a share of what they were."""
    launch(_fade, table, share, TYPE=TYPES[dtype], KEEPS=share != 0)


@triton.jit(do_not_specialize=["programs"])
def _fade(
    table,
    programs,
    share,
    TYPE: tl.constexpr,
    KEEPS: tl.constexpr,
    ALIGN: tl.constexpr,
    BLOCK: tl.constexpr,
    STEP: tl.constexpr,
):
    target, mask = block(table, programs, 0, TYPE, ALIGN), block(table, programs, 1, tl.int8, ALIGN)
    length = tl.load(table + tl.program_id(0))
    for i in range(0, BLOCK, STEP):
        place = i + tl.arange(0, STEP)
        gone = (tl.load(mask + place, mask=place < length, other=1) == 0) & (place < length)
        left = tl.zeros([STEP], TYPE)
        if KEEPS:
            left = (tl.load(target + place, mask=gone, other=0.0) * share).to(TYPE)
        tl.store(target + place, left, mask=gone)


def restore(table: Table, dtype: torch.dtype) -> None:
    """values, masks, latent: removed values come back."""
    launch(_restore, table, TYPE=TYPES[dtype])


@triton.jit(do_not_specialize=["programs"])
def _restore(table, programs, TYPE: tl.constexpr, ALIGN: tl.constexpr, BLOCK: tl.constexpr, STEP: tl.constexpr):
    value, mask = block(table, programs, 0, TYPE, ALIGN), block(table, programs, 1, tl.int8, ALIGN)
    latent = block(table, programs, 2, TYPE, ALIGN)
    length = tl.load(table + tl.program_id(0))
    for i in range(0, BLOCK, STEP):
        place = i + tl.arange(0, STEP)
        gone = (tl.load(mask + place, mask=place < length, other=1) == 0) & (place < length)
        tl.store(value + place, tl.load(latent + place, mask=gone, other=0.0), mask=gone)


def settle(table: Table, dtype: torch.dtype) -> None:
    """values, masks, latent: removed values are put away, and 0 takes their place."""
    launch(_settle, table, TYPE=TYPES[dtype])


@triton.jit(do_not_specialize=["programs"])
def _settle(table, programs, TYPE: tl.constexpr, ALIGN: tl.constexpr, BLOCK: tl.constexpr, STEP: tl.constexpr):
    value, mask = block(table, programs, 0, TYPE, ALIGN), block(table, programs, 1, tl.int8, ALIGN)
    latent = block(table, programs, 2, TYPE, ALIGN)
    length = tl.load(table + tl.program_id(0))
    for i in range(0, BLOCK, STEP):
        place = i + tl.arange(0, STEP)
        gone = (tl.load(mask + place, mask=place < length, other=1) == 0) & (place < length)
        tl.store(latent + place, tl.load(value + place, mask=gone, other=0.0), mask=gone)
        tl.store(value + place, tl.zeros([STEP], TYPE), mask=gone)


def accumulate(table: Table, dtype: torch.dtype, rates: Tensor, momentum: Tensor) -> None:
    """grads, masks, values, momenta, scores: OptG's Eq. 10 with momentum, and removed gradients become 0.

    `rates` holds a learning rate for each layer; `momentum` is a single value.
    """
    launch(_accumulate, table, rates, momentum, TYPE=TYPES[dtype])


@triton.jit(do_not_specialize=["programs"])
def _accumulate(
    table, programs, rates, momentum, TYPE: tl.constexpr, ALIGN: tl.constexpr, BLOCK: tl.constexpr, STEP: tl.constexpr
):
    grad, mask = block(table, programs, 0, TYPE, ALIGN), block(table, programs, 1, tl.int8, ALIGN)
    value = block(table, programs, 2, TYPE, ALIGN)
    momenta, scores = block(table, programs, 3, tl.float32, ALIGN), block(table, programs, 4, tl.float32, ALIGN)
    length = tl.load(table + tl.program_id(0))
    rate = tl.load(rates + tl.load(table + programs + tl.program_id(0)))
    keep = tl.load(momentum)
    for i in range(0, BLOCK, STEP):
        place = i + tl.arange(0, STEP)
        here = place < length
        gone = (tl.load(mask + place, mask=here, other=1) == 0) & here
        g = tl.load(grad + place, mask=here, other=0.0).to(tl.float32)
        w = tl.load(value + place, mask=here, other=0.0).to(tl.float32)
        m = keep * tl.load(momenta + place, mask=here, other=0.0) + g * w
        tl.store(momenta + place, m, mask=here)
        tl.store(scores + place, tl.load(scores + place, mask=here, other=0.0) - rate * m, mask=here)
        tl.store(grad + place, tl.zeros([STEP], TYPE), mask=gone)


# ---- a cut


def count(table: Table, each: bool, prefixes: Tensor, nans: Tensor, first: bool, shift: int, bits: int, width: int) -> Tensor:
    """scores, of `width` bits: one round of `optg.ranking.select_all`.

    How often each value of the `bits` at `shift` occurs, for each tensor or over all of them, in the keys whose higher bits
    are its prefix. The first round has no prefix, and sets the entry in `nans` of a tensor that has NaN.
    """
    counts = torch.zeros(len(prefixes), 1 << bits, dtype=torch.int64, device=table.rows.device)
    launch(_count, table, prefixes, counts, nans, shift, EACH=each, FIRST=first, WIDTH=width, BITS=bits)
    return counts


@triton.jit(do_not_specialize=["programs", "shift"])
def _count(
    table, programs, prefixes, counts, nans, shift, EACH: tl.constexpr,
    FIRST: tl.constexpr, WIDTH: tl.constexpr, BITS: tl.constexpr, ALIGN: tl.constexpr, BLOCK: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    integer: tl.constexpr = tl.int64 if WIDTH == 64 else tl.int32
    lowest: tl.constexpr = -(1 << (WIDTH - 1))
    infinity: tl.constexpr = 0x7FF0000000000000 if WIDTH == 64 else 0x7F800000
    start = block(table, programs, 0, integer, ALIGN)
    length = tl.load(table + tl.program_id(0))
    layer = tl.load(table + programs + tl.program_id(0))
    group = layer if EACH else layer * 0
    prefix = tl.load(prefixes + group)
    bins = tl.arange(0, 1 << BITS)
    total = tl.zeros([1 << BITS], tl.int32)
    outside = 0
    nan = 0
    for i in range(0, BLOCK, STEP):
        place = i + tl.arange(0, STEP)
        here = place < length
        bits = tl.load(start + place, mask=here, other=0)
        bits = tl.where(bits == lowest, 0, bits)  # −0.0 is 0.0
        key = tl.where(bits < 0, bits ^ ~lowest, bits)  # signed integers in the order of the floats
        upper = key >> shift
        digit = upper & ((1 << BITS) - 1)
        if FIRST:
            nan = tl.maximum(nan, tl.max(((bits & ~lowest) > infinity).to(tl.int32)))
            digit = digit ^ (1 << (BITS - 1))  # the sign's bit: negative keys come first
        else:
            here = here & ((upper >> BITS) == prefix)
        total += tl.histogram(tl.where(here, digit, 0).to(tl.int32), 1 << BITS)
        outside += STEP - tl.sum(here.to(tl.int32))
    total = tl.where(bins == 0, total - outside, total)
    tl.atomic_add(counts + (group << BITS) + bins, total.to(tl.int64), mask=total > 0)
    if nan > 0:
        tl.store(nans + layer, 1)


def recut(table: Table, tensors: int, thresholds: Tensor, tied: Tensor, width: int) -> Tensor:
    """masks, scores, of `width` bits: keep what is above its layer's threshold, and what is at it where `tied` says so.

    Returns for each layer how many weights are removed now, were until now not, and come back.
    """
    counts = torch.zeros(tensors, 3, dtype=torch.int64, device=table.rows.device)
    launch(_recut, table, thresholds, tied, counts, TYPE=tl.float64 if width == 64 else tl.float32)
    return counts


@triton.jit(do_not_specialize=["programs"])
def _recut(
    table, programs, thresholds, tied, counts, TYPE: tl.constexpr, ALIGN: tl.constexpr, BLOCK: tl.constexpr, STEP: tl.constexpr
):
    mask, score = block(table, programs, 0, tl.int8, ALIGN), block(table, programs, 1, TYPE, ALIGN)
    length = tl.load(table + tl.program_id(0))
    layer = tl.load(table + programs + tl.program_id(0))
    threshold, ties = tl.load(thresholds + layer), tl.load(tied + layer)
    zeros, removed, revived = 0, 0, 0
    for i in range(0, BLOCK, STEP):
        place = i + tl.arange(0, STEP)
        here = place < length
        before = tl.load(mask + place, mask=here, other=0) != 0
        s = tl.load(score + place, mask=here, other=0.0)
        kept = (s > threshold) | ((s == threshold) & (ties != 0))
        tl.store(mask + place, kept.to(tl.int8), mask=here)
        zeros += tl.sum((here & ~kept).to(tl.int32))
        removed += tl.sum((here & before & ~kept).to(tl.int32))
        revived += tl.sum((here & ~before & kept).to(tl.int32))
    tl.atomic_add(counts + 3 * layer, zeros.to(tl.int64))
    tl.atomic_add(counts + 3 * layer + 1, removed.to(tl.int64))
    tl.atomic_add(counts + 3 * layer + 2, revived.to(tl.int64))


# ---- images


def crop_and_flip(
    images: Tensor, index: Tensor, top: Tensor, left: Tensor, flip: Tensor, pad: int, mean: Tensor, std: Tensor
) -> Tensor:
    """`optg.data.augment.crop_and_flip` and `normalise` in one."""
    _, channels, height, width = images.shape
    out = torch.empty(len(index), channels, height, width, device=images.device, memory_format=torch.channels_last)
    size = channels * height * width
    with torch.cuda.device(images.device) if images.is_cuda else nullcontext():
        _crop_and_flip[(len(index), triton.cdiv(size, 1024))](
            images, index, top, left, flip, mean, std, out, pad, channels, height, width, 1024
        )
    return out


@triton.jit
def _crop_and_flip(images, index, top, left, flip, mean, std, out, pad, channels, height, width, STEP: tl.constexpr):
    image = tl.program_id(0)
    place = tl.program_id(1) * STEP + tl.arange(0, STEP)  # in the order of channels_last
    size = channels * height * width
    channel, column, row = place % channels, place // channels % width, place // channels // width
    mirrored = tl.load(flip + image) != 0
    x = tl.where(mirrored, width - 1 - column, column) + tl.load(left + image) - pad
    y = row + tl.load(top + image) - pad
    inside = (x >= 0) & (x < width) & (y >= 0) & (y < height) & (place < size)
    source = images + tl.load(index + image) * size + channel * height * width + y * width + x
    pixel = tl.load(source, mask=inside, other=0).to(tl.float32)
    here = place < size
    shifted = pixel - tl.load(mean + channel, mask=here, other=0.0)
    result = tl.math.div_rn(shifted, tl.load(std + channel, mask=here, other=1.0))
    tl.store(out + image * size + place, result, mask=here)
