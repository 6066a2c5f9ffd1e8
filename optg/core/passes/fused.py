"""The passes over all weights that a step or a cut makes, each as one Triton kernel for all layers together.

A kernel finds its work in a table on the device: for each program its block's layer, start and length, and for each list of
tensors the address of every layer. So a pass is one launch, whatever the number of layers, and nothing is compiled for a
model. Each entry is read and written once, in wide words; `optg.core.weights` and `optg.core.ranking` say the same in torch.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK, STEP = 1 << 13, 1 << 11  # entries of one program, and how many of them it looks at together
WIDE = 16  # where addresses (in bytes) and lengths are multiples of it, words of that size are loaded
TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}  # of weights
SCORES = {**TYPES, torch.float64: tl.float64}


class Table(NamedTuple):
    blocks: Tensor  # layer, start and length of each program's block
    addresses: Tensor  # of each layer's first entry, a row for each list
    align: int  # of all addresses and lengths


BLOCKS: dict[Any, Tensor] = {}  # by layer sizes and device: one for each model, and small


class Tables:
    """Makes tables and keeps them: parameters, masks and latent weights stay where they are, and gradients mostly do."""

    KEPT = 16  # the last that were used, beside all that graphs use

    def __init__(self) -> None:
        self.tables: dict[Any, Table] = {}
        self.spare: dict[Any, Tensor] = {}  # pinned memory, one of each shape: under capture none can be allocated
        self.captured: list[Any] = []  # what graphs read at each replay

    def __call__(self, *lists: Sequence[Tensor]) -> Table | None:
        """The table of parallel lists of tensors; None where their entries do not lie side by side."""
        capturing = lists[0][0].is_cuda and torch.cuda.is_current_stream_capturing()
        key = (len(lists), *((t.data_ptr(), t.dtype, t.shape, t.stride()) for tensors in lists for t in tensors))
        known = self.tables.pop(key, None)
        table = known or self.make(lists, capturing)
        if table is None:
            return None
        if known or not capturing:  # one made under capture has its addresses only when that graph is replayed
            self.tables[key] = table
            if len(self.tables) > self.KEPT:
                self.tables.pop(next(iter(self.tables)))
        if capturing:
            self.captured.append(table)
        return table

    def make(self, lists: Sequence[Sequence[Tensor]], capturing: bool) -> Table | None:
        sizes, shape = tuple(t.numel() for t in lists[0]), (len(lists), len(lists[0]))
        device = lists[0][0].device
        if capturing and (shape not in self.spare or (sizes, device) not in BLOCKS):  # not even one step before
            return None
        if not all(alike(tensors) for tensors in zip(*lists)) or any(len({t.dtype for t in tensors}) > 1 for tensors in lists):
            return None
        if (sizes, device) not in BLOCKS:
            BLOCKS[sizes, device] = torch.from_numpy(split(np.array(sizes))).to(device)
        found = np.array([[t.data_ptr() for t in tensors] for tensors in lists])
        wide = not (found % WIDE).any() and not any(size % WIDE for size in sizes)
        addresses = torch.from_numpy(found)
        if capturing:
            addresses = self.spare.pop(shape).copy_(addresses)
            self.captured.append(addresses)
        elif shape not in self.spare and device.type == "cuda":
            self.spare[shape] = addresses.pin_memory()
        return Table(BLOCKS[sizes, device], addresses.to(device, non_blocking=True), WIDE if wide else 1)


TABLES = Tables()  # of lists that nobody keeps, such as scores: one made again is often where the last one was


def split(sizes: np.ndarray) -> np.ndarray:
    """Layer, start and length of the block of each program."""
    programs = -(-sizes // BLOCK)
    layers = np.repeat(np.arange(len(sizes)), programs)
    starts = (np.arange(len(layers)) - np.repeat(programs.cumsum() - programs, programs)) * BLOCK
    return np.stack([layers, starts, np.minimum(BLOCK, sizes[layers] - starts)])


def filters(shapes: Sequence[torch.Size], device: torch.device) -> Tensor:
    """Layer, start and length of each filter: a block of its own for each."""
    key = (*shapes, device)
    if key not in BLOCKS:
        rows = [
            (layer, i * shape[1:].numel(), shape[1:].numel()) for layer, shape in enumerate(shapes) for i in range(shape[0])
        ]
        BLOCKS[key] = torch.tensor(rows, device=device).T.contiguous()
    return BLOCKS[key]


def alike(tensors: Sequence[Tensor]) -> bool:
    """Do they fill their memory, all in the same order of dimensions?"""
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


def gpu_of(tensor: Tensor) -> AbstractContextManager[object]:
    """Triton launches on the current GPU: make it the tensor's."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()


def launch(kernel: Any, table: Table, *args: Any, **constants: Any) -> None:
    programs, tensors = table.blocks.shape[1], table.addresses.shape[1]
    if programs:
        with gpu_of(table.blocks):
            kernel[(programs,)](
                table.blocks, table.addresses, programs, tensors, *args, ALIGN=table.align, BLOCK=BLOCK, STEP=STEP, **constants
            )


@triton.jit
def place(blocks, programs, ALIGN: tl.constexpr):
    """This program's layer, and the start and length of its block."""
    program = tl.program_id(0)
    start, length = tl.load(blocks + programs + program), tl.load(blocks + 2 * programs + program)
    return tl.load(blocks + program), tl.multiple_of(start, ALIGN), tl.multiple_of(length, ALIGN)


@triton.jit
def block(addresses, tensors, LIST: tl.constexpr, layer, start, TYPE: tl.constexpr, ALIGN: tl.constexpr):
    """Where this program's block of a list begins. A thread takes 4 entries at once, of each list the same ones."""
    pointer = tl.load(addresses + LIST * tensors + layer).to(tl.pointer_type(TYPE))
    if ALIGN > 1:
        if TYPE == tl.int8:
            pointer = tl.multiple_of(pointer, 4)
        elif TYPE == tl.bfloat16 or TYPE == tl.float16:
            pointer = tl.multiple_of(pointer, 8)
        else:
            pointer = tl.multiple_of(pointer, 16)
    return pointer + start


# ---- a step


def fade(table: Table, dtype: torch.dtype, share: float = 0.0) -> None:
    """targets, masks: removed entries of the targets are left with a share of what they were."""
    launch(_fade, table, share, TYPE=TYPES[dtype], BLANKS=share == 0)


@triton.jit(do_not_specialize=["programs", "tensors"])
def _fade(
    blocks, addresses, programs, tensors, share, TYPE: tl.constexpr, BLANKS: tl.constexpr,
    ALIGN: tl.constexpr, BLOCK: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    layer, start, length = place(blocks, programs, ALIGN)
    targets = block(addresses, tensors, 0, layer, start, TYPE, ALIGN)
    masks = block(addresses, tensors, 1, layer, start, tl.int8, ALIGN)
    for i in range(0, BLOCK, STEP):
        at = i + tl.arange(0, STEP)
        here = at < length
        target = tl.load(targets + at, mask=here, other=0.0)
        left = tl.zeros([STEP], TYPE) if BLANKS else (target * share).to(TYPE)
        tl.store(targets + at, tl.where(tl.load(masks + at, mask=here, other=1) != 0, target, left), mask=here)


def restore(table: Table, dtype: torch.dtype) -> None:
    """values, masks, latent: removed values come back."""
    launch(_restore, table, TYPE=TYPES[dtype])


@triton.jit(do_not_specialize=["programs", "tensors"])
def _restore(
    blocks, addresses, programs, tensors, TYPE: tl.constexpr,
    ALIGN: tl.constexpr, BLOCK: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    layer, start, length = place(blocks, programs, ALIGN)
    values = block(addresses, tensors, 0, layer, start, TYPE, ALIGN)
    masks = block(addresses, tensors, 1, layer, start, tl.int8, ALIGN)
    latents = block(addresses, tensors, 2, layer, start, TYPE, ALIGN)
    for i in range(0, BLOCK, STEP):
        at = i + tl.arange(0, STEP)
        here = at < length
        value, latent = tl.load(values + at, mask=here, other=0.0), tl.load(latents + at, mask=here, other=0.0)
        tl.store(values + at, tl.where(tl.load(masks + at, mask=here, other=1) != 0, value, latent), mask=here)


def settle(table: Table, dtype: torch.dtype) -> None:
    """values, masks, latent: values are put away, and where they are removed 0 takes their place."""
    launch(_settle, table, TYPE=TYPES[dtype])


@triton.jit(do_not_specialize=["programs", "tensors"])
def _settle(
    blocks, addresses, programs, tensors, TYPE: tl.constexpr,
    ALIGN: tl.constexpr, BLOCK: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    layer, start, length = place(blocks, programs, ALIGN)
    values = block(addresses, tensors, 0, layer, start, TYPE, ALIGN)
    masks = block(addresses, tensors, 1, layer, start, tl.int8, ALIGN)
    latents = block(addresses, tensors, 2, layer, start, TYPE, ALIGN)
    for i in range(0, BLOCK, STEP):
        at = i + tl.arange(0, STEP)
        here = at < length
        value = tl.load(values + at, mask=here, other=0.0)
        tl.store(latents + at, value, mask=here)
        tl.store(values + at, tl.where(tl.load(masks + at, mask=here, other=1) != 0, value, 0.0).to(TYPE), mask=here)


def soften(table: Table, dtype: torch.dtype, thresholds: Tensor, power: float, rescales: Sequence[torch.Size] = ()) -> None:
    """values, masks, latent: values <- `optg.methods.feather.power_threshold` of latent ones, 0 where removed.

    Given the layers' shapes, `optg.methods.st3` makes up for the cut by filter.
    """
    factors = sizes = thresholds  # pointers that are not read
    if rescales:
        rows, device = filters(rescales, thresholds.device), thresholds.device
        factors = torch.empty(rows.shape[1], dtype=torch.float32, device=device)
        launch(_make_up, Table(rows, table.addresses, 1), factors, TYPE=TYPES[dtype])
        if ("first", *rescales, device) not in BLOCKS:
            counts = np.array([shape[0] for shape in rescales])
            inner = np.array([shape[1:].numel() for shape in rescales])
            BLOCKS["first", *rescales, device] = torch.from_numpy(np.stack([counts.cumsum() - counts, inner])).to(device)
        sizes = BLOCKS["first", *rescales, device]
    launch(_soften, table, thresholds, power, factors, sizes, TYPE=TYPES[dtype], RESCALES=bool(rescales))


@triton.jit(do_not_specialize=["programs", "tensors"])
def _make_up(
    blocks, addresses, programs, tensors, factors, TYPE: tl.constexpr,
    ALIGN: tl.constexpr, BLOCK: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    layer, start, length = place(blocks, programs, ALIGN)
    masks = block(addresses, tensors, 1, layer, start, tl.int8, ALIGN)
    latents = block(addresses, tensors, 2, layer, start, TYPE, ALIGN)
    whole, kept = tl.zeros([STEP], tl.float32), tl.zeros([STEP], tl.float32)
    for i in range(0, length, STEP):
        at = i + tl.arange(0, STEP)
        here = at < length
        magnitude = tl.abs(tl.load(latents + at, mask=here, other=0.0).to(tl.float32))
        whole += magnitude
        kept += tl.where(tl.load(masks + at, mask=here, other=0) != 0, magnitude, 0.0)
    share = (tl.sum(kept) / length) / (tl.sum(whole) / length + 1e-12)
    tl.store(factors + tl.program_id(0), 1.01 / (share + 0.01))


@triton.jit(do_not_specialize=["programs", "tensors"])
def _soften(
    blocks, addresses, programs, tensors, thresholds, power, factors, sizes, TYPE: tl.constexpr, RESCALES: tl.constexpr,
    ALIGN: tl.constexpr, BLOCK: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    layer, start, length = place(blocks, programs, ALIGN)
    values = block(addresses, tensors, 0, layer, start, TYPE, ALIGN)
    masks = block(addresses, tensors, 1, layer, start, tl.int8, ALIGN)
    latents = block(addresses, tensors, 2, layer, start, TYPE, ALIGN)
    threshold = tl.load(thresholds + layer)
    for i in range(0, BLOCK, STEP):
        at = i + tl.arange(0, STEP)
        here = at < length
        kept = tl.load(masks + at, mask=here, other=0) != 0
        latent = tl.load(latents + at, mask=here, other=1.0).to(tl.float32)
        share = tl.minimum(threshold / tl.where(kept, tl.abs(latent), 1.0), 1.0)
        rest = 1.0 - tl.exp2(tl.log2(share) * power)  # log2(0) is −∞, and its power 0
        soft = latent * tl.exp2(tl.log2(rest) / power)
        if RESCALES:
            row = tl.load(sizes + layer) + (start + at) // tl.load(sizes + tensors + layer)
            soft = soft * tl.load(factors + row, mask=here, other=1.0)
        soft = tl.where(threshold > 0, soft, latent)
        tl.store(values + at, tl.where(kept, soft, 0.0).to(TYPE), mask=here)


def accumulate(table: Table, dtype: torch.dtype, rates: Tensor, momentum: Tensor) -> None:
    """grads, masks, values, momenta, scores: OptG's Eq. 10 with momentum, and removed gradients become 0.

    `rates` holds a learning rate for each layer; `momentum` is a single value.
    """
    launch(_accumulate, table, rates, momentum, TYPE=TYPES[dtype])


@triton.jit(do_not_specialize=["programs", "tensors"])
def _accumulate(
    blocks, addresses, programs, tensors, rates, momentum, TYPE: tl.constexpr,
    ALIGN: tl.constexpr, BLOCK: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    layer, start, length = place(blocks, programs, ALIGN)
    grads = block(addresses, tensors, 0, layer, start, TYPE, ALIGN)
    masks = block(addresses, tensors, 1, layer, start, tl.int8, ALIGN)
    values = block(addresses, tensors, 2, layer, start, TYPE, ALIGN)
    momenta = block(addresses, tensors, 3, layer, start, tl.float32, ALIGN)
    scores = block(addresses, tensors, 4, layer, start, tl.float32, ALIGN)
    rate, inertia = tl.load(rates + layer), tl.load(momentum)
    for i in range(0, BLOCK, STEP):
        at = i + tl.arange(0, STEP)
        here = at < length
        grad, value = tl.load(grads + at, mask=here, other=0.0), tl.load(values + at, mask=here, other=0.0)
        m = inertia * tl.load(momenta + at, mask=here, other=0.0) + grad.to(tl.float32) * value.to(tl.float32)
        tl.store(momenta + at, m, mask=here)
        tl.store(scores + at, tl.load(scores + at, mask=here, other=0.0) - rate * m, mask=here)
        tl.store(grads + at, tl.where(tl.load(masks + at, mask=here, other=1) != 0, grad, 0.0).to(TYPE), mask=here)


def sum_signed(table: Table, dtype: torch.dtype, longest: int) -> Tensor:
    """grads, masks, values: removed gradients become 0. Returns of each layer Σ g · sign(w), in the same order every time."""
    sums = torch.zeros(table.addresses.shape[1], -(-longest // BLOCK), device=table.blocks.device)
    launch(_sum_signed, table, sums, sums.shape[1], TYPE=TYPES[dtype])
    return sums.sum(1)


@triton.jit(do_not_specialize=["programs", "tensors", "columns"])
def _sum_signed(
    blocks, addresses, programs, tensors, sums, columns, TYPE: tl.constexpr,
    ALIGN: tl.constexpr, BLOCK: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    layer, start, length = place(blocks, programs, ALIGN)
    grads = block(addresses, tensors, 0, layer, start, TYPE, ALIGN)
    masks = block(addresses, tensors, 1, layer, start, tl.int8, ALIGN)
    values = block(addresses, tensors, 2, layer, start, TYPE, ALIGN)
    total = tl.zeros([STEP], tl.float32)
    for i in range(0, BLOCK, STEP):
        at = i + tl.arange(0, STEP)
        here = at < length
        grad, value = tl.load(grads + at, mask=here, other=0.0), tl.load(values + at, mask=here, other=0.0)
        grad = tl.where(tl.load(masks + at, mask=here, other=0) != 0, grad, 0.0).to(TYPE)
        tl.store(grads + at, grad, mask=here)
        total += tl.where(value > 0, grad, tl.where(value < 0, -grad, 0.0)).to(tl.float32)
    tl.store(sums + layer * columns + start // BLOCK, tl.sum(total))


# ---- a cut


def count(table: Table, each: bool, prefixes: Tensor, nans: Tensor, first: bool, shift: int, bits: int, width: int) -> Tensor:
    """scores, of `width` bits: one round of `optg.core.ranking.thresholds`.

    How often each value of the `bits` at `shift` occurs, for each tensor or over all of them, in the keys whose higher bits
    are its prefix. The first round has no prefix, and sets the entry in `nans` of a tensor that has NaN.
    """
    counts = torch.zeros(len(prefixes), 1 << bits, dtype=torch.int64, device=prefixes.device)
    launch(_count, table, prefixes, counts, nans, shift, EACH=each, FIRST=first, WIDTH=width, BITS=bits)
    return counts


@triton.jit(do_not_specialize=["programs", "tensors", "shift"])
def _count(
    blocks, addresses, programs, tensors, prefixes, counts, nans, shift, EACH: tl.constexpr,
    FIRST: tl.constexpr, WIDTH: tl.constexpr, BITS: tl.constexpr, ALIGN: tl.constexpr, BLOCK: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    integer: tl.constexpr = tl.int64 if WIDTH == 64 else tl.int32
    lowest: tl.constexpr = -(1 << (WIDTH - 1))
    infinity: tl.constexpr = 0x7FF0000000000000 if WIDTH == 64 else 0x7F800000
    layer, start, length = place(blocks, programs, ALIGN)
    scores = block(addresses, tensors, 0, layer, start, integer, 1)  # a histogram wants one entry of a thread
    group = layer if EACH else layer * 0
    prefix = tl.load(prefixes + group)
    bins = counts + (group << BITS)
    total = tl.zeros([1 << BITS], tl.int32)
    nan = 0
    for i in range(0, BLOCK, STEP):
        at = i + tl.arange(0, STEP)
        here = at < length
        bits = tl.load(scores + at, mask=here, other=0)
        bits = tl.where(bits == lowest, 0, bits)  # −0.0 is 0.0
        key = tl.where(bits < 0, bits ^ ~lowest, bits)  # signed integers in the order of the floats
        upper = key >> shift
        digit = (upper & ((1 << BITS) - 1)).to(tl.int32)
        if FIRST:
            nan = tl.maximum(nan, tl.max(((bits & ~lowest) > infinity).to(tl.int32)))
            digit = digit ^ (1 << (BITS - 1))  # the sign's bit: negative keys come first
        else:
            here = here & ((upper >> BITS) == prefix)
        total = tally(bins, total, digit, here, BITS, STEP)
    tl.atomic_add(bins + tl.arange(0, 1 << BITS), total.to(tl.int64), mask=total > 0)
    if nan > 0:
        tl.store(nans + layer, 1)


@triton.jit
def tally(bins, total, digit, here, BITS: tl.constexpr, STEP: tl.constexpr):
    """Count digits: in this program's `total`, or where they are few, which a histogram does not gain from, in `bins`."""
    found = tl.sum(here.to(tl.int32))
    if found * 32 > STEP:
        whole = tl.histogram(tl.where(here, digit, 0), 1 << BITS)
        total += tl.where(tl.arange(0, 1 << BITS) == 0, whole - (STEP - found), whole)
    elif found > 0:
        tl.atomic_add(bins + digit, tl.full([STEP], 1, tl.int64), mask=here)
    return total


def narrow(counts: Tensor, prefixes: Tensor, ranks: Tensor) -> Sequence[Tensor]:
    """`optg.core.ranking.narrow` in one launch."""
    found, digits = torch.empty(3, *prefixes.shape, dtype=torch.int64, device=counts.device), counts.shape[1]
    with gpu_of(counts):
        _narrow[(len(counts),)](counts, prefixes, ranks, found, len(counts), DIGITS=digits, STEP=min(digits, 1024))
    return found.unbind()


@triton.jit(do_not_specialize=["groups"])
def _narrow(counts, prefixes, ranks, found, groups, DIGITS: tl.constexpr, STEP: tl.constexpr):
    group = tl.program_id(0)
    counts += group * DIGITS
    prefix, rank = tl.load(prefixes + group), tl.load(ranks + group)
    digit, below, seen = prefix * 0, prefix * 0, prefix * 0
    for i in range(0, DIGITS, STEP):
        count = tl.load(counts + i + tl.arange(0, STEP))
        lower = seen + tl.cumsum(count) < rank
        digit += tl.sum(lower.to(tl.int64))
        below += tl.sum(tl.where(lower, count, 0))
        seen += tl.sum(count)
    digit = tl.minimum(digit, DIGITS - 1)
    tl.store(found + group, prefix * DIGITS + digit)
    tl.store(found + groups + group, rank - below)
    tl.store(found + 2 * groups + group, tl.load(counts + digit))


def places(tensors: Sequence[Tensor], each: bool) -> Tensor | None:
    """What turns a place in memory into an index: of each tensor, two sizes such that memory holds (rows, plane, inner) and
    an index counts (rows, inner, plane); and its first index, which is 0 if each has its own. None for other layouts."""
    device = tensors[0].device
    key = ("places", each, *((t.shape, t.stride()) for t in tensors), device)
    if key not in BLOCKS:
        sizes = [plane_and_inner(t) for t in tensors]
        if None in sizes:
            return None
        first = np.array([0 if each else t.numel() for t in tensors])
        BLOCKS[key] = torch.from_numpy(np.array([*zip(*sizes), first.cumsum() - first])).to(device)
    return BLOCKS[key]


def plane_and_inner(tensor: Tensor) -> tuple[int, int] | None:
    if tensor.is_contiguous():
        return 1, max(1, tensor.numel())
    if tensor.ndim == 2 and tensor.T.is_contiguous():
        return tensor.shape[1], tensor.shape[0]
    if tensor.ndim > 2 and tensor.movedim(1, -1).is_contiguous():  # channels_last
        return tensor.shape[2:].numel(), tensor.shape[1]
    return None


@triton.jit
def index_of(place, places, tensors, layer):
    """The index of what stands at a place of a layer's memory."""
    plane, inner = tl.load(places + layer), tl.load(places + tensors + layer)
    row, rest = place // (plane * inner), place % (plane * inner)
    return tl.load(places + 2 * tensors + layer) + row * (plane * inner) + rest % inner * plane + rest // inner


TIE_BITS = 13  # of an index that one round decides: two rounds for up to 67M scores


def count_ties(
    table: Table, dtype: torch.dtype, thresholds: Tensor, split: Tensor, places: Tensor, prefixes: Tensor, shift: int
) -> Tensor:
    """masks, scores: how often each value of the TIE_BITS at `shift` occurs in the indices of scores at their threshold, where
    `split` says so and higher bits are the prefix."""
    counts = torch.zeros(len(prefixes), 1 << TIE_BITS, dtype=torch.int64, device=prefixes.device)
    given = thresholds, split.view(torch.int8), places, prefixes, counts, shift
    launch(_count_ties, table, *given, EACH=len(prefixes) > 1, TYPE=SCORES[dtype], BITS=TIE_BITS)
    return counts


@triton.jit(do_not_specialize=["programs", "tensors", "shift"])
def _count_ties(
    blocks, addresses, programs, tensors, thresholds, split, places, prefixes, counts, shift, EACH: tl.constexpr,
    TYPE: tl.constexpr, BITS: tl.constexpr, ALIGN: tl.constexpr, BLOCK: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    layer, start, length = place(blocks, programs, ALIGN)
    group = layer if EACH else layer * 0
    if tl.load(split + group) != 0:
        scores = block(addresses, tensors, 1, layer, start, TYPE, 1)  # four entries of a thread would double the code
        threshold, prefix = tl.load(thresholds + group), tl.load(prefixes + group)
        bins = counts + (group << BITS)
        for i in range(0, BLOCK, STEP):
            at = i + tl.arange(0, STEP)
            here = at < length
            here = here & (tl.load(scores + at, mask=here, other=0.0) == threshold)
            if tl.sum(here.to(tl.int32)) > 0:
                upper = index_of(start + at, places, tensors, layer) >> shift
                digit = upper & ((1 << BITS) - 1)
                tl.atomic_add(bins + digit, tl.full([STEP], 1, tl.int64), mask=here & ((upper >> BITS) == prefix))


KEEP, DROP = -1, -2  # all ties of a layer, where it has no last one to go


def recut(
    table: Table, dtype: torch.dtype, thresholds: Tensor, last: Tensor, places: Tensor | None = None, magnitudes: bool = False
) -> Tensor:
    """masks, scores: keep what is above its layer's threshold, and what is at it and has an index above the `last` to go, or
    all such (KEEP) or none (DROP, which needs no places). The scores are values, or the magnitudes of values.

    Returns for each layer how many weights are removed now, were until now not, and come back.
    """
    counts = torch.zeros(table.addresses.shape[1], 3, dtype=torch.int64, device=thresholds.device)
    places = last if places is None else places  # a pointer that is not read
    launch(_recut, table, thresholds, last, places, counts, TYPE=SCORES[dtype], MAGNITUDES=magnitudes)
    return counts


@triton.jit(do_not_specialize=["programs", "tensors"])
def _recut(
    blocks, addresses, programs, tensors, thresholds, lasts, places, counts, TYPE: tl.constexpr, MAGNITUDES: tl.constexpr,
    ALIGN: tl.constexpr, BLOCK: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    layer, start, length = place(blocks, programs, ALIGN)
    masks = block(addresses, tensors, 0, layer, start, tl.int8, ALIGN)
    scores = block(addresses, tensors, 1, layer, start, TYPE, ALIGN)
    threshold, last = tl.load(thresholds + layer), tl.load(lasts + layer)
    zeros, removed, revived = 0, 0, 0
    for i in range(0, BLOCK, STEP):
        at = i + tl.arange(0, STEP)
        here = at < length
        before = tl.load(masks + at, mask=here, other=0) != 0
        score = tl.load(scores + at, mask=here, other=0.0)
        if MAGNITUDES:
            score = tl.abs(score.to(tl.float32))
        kept = score > threshold
        if last > -2:
            kept = kept | ((score == threshold) & (index_of(start + at, places, tensors, layer) > last))
        tl.store(masks + at, kept.to(tl.int8), mask=here)
        zeros += tl.sum((here & ~kept).to(tl.int32))
        removed += tl.sum((here & before & ~kept).to(tl.int32))
        revived += tl.sum((here & ~before & kept).to(tl.int32))
    tl.atomic_add(counts + 3 * layer, zeros.to(tl.int64))
    tl.atomic_add(counts + 3 * layer + 1, removed.to(tl.int64))
    tl.atomic_add(counts + 3 * layer + 2, revived.to(tl.int64))
