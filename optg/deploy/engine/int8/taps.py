"""The weights of a convolution in the order in which its kernel reads them: groups of 4 taps, without the zeros."""

from itertools import pairwise
from typing import NamedTuple

import numpy as np

GROUP = 4  # taps that one instruction multiplies
SINGLE, WIDE = 16, (12, 4)  # instructions of a group: for one filter; for several, and for each of them
OFFSET_UNIT = 8  # bytes: an address can multiply an offset by this
RESCALE = 20  # instructions that rescale a vector of results


class Taps(NamedTuple):
    """Filters in bundles: first those of several filters that share their taps, then single filters."""

    bundles: np.ndarray  # parts × rows of BUNDLE
    bases: np.ndarray  # bytes to the first tap of each part
    cost: np.ndarray  # instructions of all bundles before each one
    wide_count: int
    offset_unit: int  # offsets of single filters are uint16, in so many bytes; 0: they are int32, in bytes
    arrays: list[np.ndarray]  # the taps

    @property
    def bytes(self) -> int:
        return sum(array.nbytes for array in self.arrays)


BUNDLE = np.dtype([("taps", np.uint64), *((name, np.int32) for name in ("groups", "channel", "width", "ends_short"))])


def make_taps(weight: np.ndarray, offsets: np.ndarray, width: int, parts: int = 1) -> Taps:
    """Return the taps of filters (rows of `weight`) whose inputs lie `offsets` bytes from the first one.

    Args:
        weight: filters × blocks × weights of a block, int8. Blocks have 1, 2 or 4 weights; only those of 1 can be shared.
        offsets: of each filter's blocks, or one row for all filters.
        width: filters that share their taps; those left over run alone.
        parts: the taps are cut into so many parts, one after the other; only where filters run alone.
    """
    offsets = np.broadcast_to(offsets, weight.shape[:2])
    wide = len(weight) // width if width > 1 else 0
    edges = [weight.shape[1] * part // parts for part in range(parts + 1)]
    ranges = [slice(first, last) for first, last in pairwise(edges)]
    bases = np.array([int(offsets[:, each].min()) for each in ranges], np.int64)
    near = np.concatenate([offsets[:, each] - base for each, base in zip(ranges, bases)], axis=1)
    unit = offset_unit(near) if weight.shape[2] == 1 else 0
    order = np.argsort(weight[wide * width :].any(axis=2).sum(axis=1), kind="stable")
    tables, rows = [], []
    if wide:
        shared, table = wide_taps(weight[: wide * width, :, 0], near[: wide * width], width)
        rows.append(shared)
        tables.append(table)
    for each in ranges:
        alone, table = single_taps(weight[wide * width :, each], near[wide * width :, each], order, unit, wide * width)
        rows.append(alone)
        tables.append(table)
    bundles = np.concatenate(rows).reshape(parts, -1)
    widths = bundles["width"][0].astype(np.int64)
    groups = bundles["groups"].sum(axis=0, dtype=np.int64)
    work = groups * np.where(widths > 1, WIDE[0] + WIDE[1] * widths, SINGLE) + RESCALE * widths
    cost = np.concatenate([[0], np.cumsum(work)]).astype(np.int64)
    return Taps(bundles, bases, cost, wide, unit, tables)


def offset_unit(offsets: np.ndarray) -> int:
    """Return `OFFSET_UNIT` if all offsets are multiples of it that fit 16 bits; otherwise 0."""
    fits = not (offsets % OFFSET_UNIT).any() and int(offsets.max()) // OFFSET_UNIT < 2**16
    return OFFSET_UNIT if fits else 0


def single_taps(
    weight: np.ndarray, offsets: np.ndarray, order: np.ndarray, unit: int, first: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return bundles of one filter each. Those with few taps come first, so that consecutive loops have similar lengths."""
    size = weight.shape[2]
    blocks = GROUP // size  # of a group
    used = np.ascontiguousarray(weight).view(f"i{size}")[:, :, 0] != 0
    filters, taps = np.divmod(np.flatnonzero(used), max(1, used.shape[1]))  # faster than np.nonzero
    counts = np.bincount(filters, minlength=len(weight))
    groups = -(-counts // blocks)
    start = np.zeros(len(weight), np.int64)
    start[order] = np.cumsum(groups[order]) - groups[order]
    slot = start[filters] * blocks + np.arange(len(filters)) - (np.cumsum(counts) - counts)[filters]
    total = int(groups.sum())
    where, values = np.zeros(total * blocks, np.int64), np.zeros((total * blocks, size), np.int8)
    where[slot], values[slot] = offsets[filters, taps], weight[filters, taps]
    kind = np.uint16 if unit else np.int32
    table = np.zeros(total, np.dtype([("offsets", kind, (blocks,)), ("weights", np.int8, GROUP)]))
    table["offsets"] = (where // (unit or 1)).reshape(-1, blocks)
    table["weights"] = values.reshape(-1, GROUP)
    rows = bundle_rows(table, start[order], groups[order], first + order, 1)
    rows["ends_short"] = ((counts[order] - 1) % GROUP < 2) & (counts[order] > 0) if size == 1 else 0
    return rows, table


def wide_taps(weight: np.ndarray, offsets: np.ndarray, width: int) -> tuple[np.ndarray, np.ndarray]:
    """Return bundles of `width` filters, with every tap that one of them uses."""
    rows = weight.reshape(-1, width, weight.shape[1])
    used, taps = np.nonzero(rows.any(axis=1))
    counts = np.bincount(used, minlength=len(rows))
    groups = -(-counts // GROUP)
    start = np.cumsum(groups) - groups
    slot = start[used] * GROUP + np.arange(len(used)) - (np.cumsum(counts) - counts)[used]
    total = int(groups.sum())
    where, values = np.zeros(total * GROUP, np.int32), np.zeros((total * GROUP, width), np.int8)
    where[slot], values[slot] = offsets[used * width, taps], rows[used, :, taps]
    table = np.zeros(total, np.dtype([("offsets", np.int32, GROUP), ("weights", np.int8, (width, GROUP))]))
    table["offsets"] = where.reshape(-1, GROUP)
    table["weights"] = values.reshape(-1, GROUP, width).transpose(0, 2, 1)
    return bundle_rows(table, start, groups, np.arange(len(rows)) * width, width), table


def bundle_rows(table: np.ndarray, start: np.ndarray, groups: np.ndarray, channels: np.ndarray, width: int) -> np.ndarray:
    rows = np.zeros(len(groups), BUNDLE)
    rows["taps"] = table.ctypes.data + start.astype(np.uint64) * table.itemsize
    rows["groups"], rows["channel"], rows["width"] = groups, channels, width
    return rows
