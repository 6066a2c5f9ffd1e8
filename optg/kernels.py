"""The one loop that torch's own operations make too slowly on a GPU, as a Triton kernel: the histogram of a ranking round."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK, STEP = 1 << 14, 1 << 11  # scores of one program, and how many of them it looks at together


class Spans(NamedTuple):
    """The work of each program: address and number of its scores, and the tensor that they are of, in three rows."""

    table: Tensor
    tensors: int
    width: int  # of a score, in bits


def spans(scores: Sequence[Tensor]) -> Spans:
    sizes = np.array([s.numel() for s in scores])
    programs = -(-sizes // BLOCK)
    layers = np.repeat(np.arange(len(scores)), programs)
    starts = (np.arange(len(layers)) - np.repeat(programs.cumsum() - programs, programs)) * BLOCK
    lengths = np.minimum(BLOCK, sizes[layers] - starts)
    addresses = np.array([s.data_ptr() for s in scores])[layers] + starts * scores[0].itemsize
    table = np.stack([addresses, lengths, layers])
    return Spans(torch.from_numpy(table).to(scores[0].device), len(scores), scores[0].itemsize * 8)


def count(spans: Spans, bits: int, shift: int, prefix: int | None) -> Tensor:
    """One round of `optg.ranking.counter`."""
    table, device = spans.table, spans.table.device
    counts = torch.zeros((1 << bits) + spans.tensors, dtype=torch.int64, device=device)
    if programs := table.shape[1]:
        with torch.cuda.device(device):
            _count[(programs,)](table, programs, counts, shift, prefix or 0, prefix is None, spans.width, bits, BLOCK, STEP)
    return counts


@triton.jit(do_not_specialize=["programs", "shift", "prefix"])
def _count(
    table, programs, counts, shift, prefix,
    FIRST: tl.constexpr, WIDTH: tl.constexpr, BITS: tl.constexpr, BLOCK: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    integer: tl.constexpr = tl.int64 if WIDTH == 64 else tl.int32
    lowest: tl.constexpr = -(1 << (WIDTH - 1))
    infinity: tl.constexpr = 0x7FF0000000000000 if WIDTH == 64 else 0x7F800000
    start = tl.load(table + program).to(tl.pointer_type(integer))
    length = tl.load(table + programs + program)
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
    tl.atomic_add(counts + bins, total.to(tl.int64), mask=total > 0)
    if nan > 0:
        tl.store(counts + (1 << BITS) + tl.load(table + 2 * programs + program), 1)
