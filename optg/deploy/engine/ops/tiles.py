"""The tables that C needs for a convolution: taps, filters and tiles.

A tap is where to read the input and the weight to multiply it by; zeros have none. A filter is the list of taps of one or more
output channels. A tile is a rectangle of output positions that a kernel computes at once.
"""

import math
from itertools import pairwise, product
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from optg.deploy.engine.build import Kernel, Library
from optg.deploy.engine.layout import Layout

if TYPE_CHECKING:
    from optg.deploy.engine.ops.base import Pair
    from optg.deploy.engine.ops.convolution import Convolution, ConvolutionStep

TRIED = 6  # candidates of each kind to time
PARTS = 45e3, 110e3  # bytes of the input that a tile should read at once: a little more than the first cache holds
FEWEST = 4  # taps of a filter in a part
LARGEST = 28  # vectors of a tile

SHORT = ("rows", "columns", "shared", "single", "first", "last")
TILE = np.dtype([*((n, "i8") for n in ("in", "out", "add")), *((n, "i4") for n in SHORT), ("filters", "i8")])

SIDES = 9  # (all rows, all but the first, all but the last) × the same for columns
FILTER = np.dtype([("taps", "u8"), ("count", "i8"), ("channel", "i8"), ("width", "i8"), ("framed", "i4", SIDES + 1)])


class Tiling(NamedTuple):
    """Channels that share taps, and rows and columns of a tile."""

    channels: int
    rows: int
    columns: int
    trimmed: bool = False  # are taps left out that only read padding?
    outside: bool = False  # is the outer loop over filters, not over tiles?
    parts: int = 1  # rounds over the tile, each for a part of the input channels


def pieces(first: int, last: int, most: int) -> list[tuple[int, int]]:
    """Cut a range into pieces of nearly equal size, of at most `most`."""
    n = math.ceil((last - first) / most)
    return list(pairwise(first + (last - first) * i // n for i in range(n + 1)))


class Filters(NamedTuple):
    """C's `filter` structs, and the taps that they point to."""

    table: np.ndarray
    taps: np.ndarray


class Taps:
    """Makes the filters of a convolution, and keeps them for tilings that need the same ones."""

    def __init__(self, op: "Convolution", source: Layout, stride: "Pair", framed: bool) -> None:
        self.op, self.source, self.stride, self.framed = op, source, stride, framed
        self.weight = op.weight.astype(np.float32)
        self.made: dict[tuple[int, bytes, tuple[int, int]], Filters] = {}

    def sides(self, top: int, bottom: int, left: int, right: int) -> np.ndarray:
        """Return, for each element of the kernel, which part of a tile reads pixels: a number below SIDES, or -1 for none."""
        kinds = []
        window, image = self.op.window, (self.source.height, self.source.width)
        for axis, (first, last) in enumerate(((top, bottom), (left, right))):
            tap = np.arange(window.kernel[axis])[:, None] * window.dilation[axis] - window.padding[axis]
            pixel = np.arange(first, last) * self.stride[axis] + tap
            inside = (pixel >= 0) & (pixel < image[axis])
            kind = np.where(inside[:, 0], np.where(inside[:, -1], 0, 2), 1)
            kinds.append(np.where(inside.any(axis=1), kind, -1))
        rows, columns = kinds[0][:, None], kinds[1][None, :]
        return np.where((rows < 0) | (columns < 0), -1, 3 * rows + columns).astype(np.int8)

    def filters(self, channels: int, sides: np.ndarray, part: tuple[int, int]) -> Filters:
        """Return filters for groups of this many output channels, and single ones for the rest.

        Args:
            sides: which part of a tile each element of the kernel sees; those with -1 are left out.
            part: the first and last input channel.
        """
        key = channels, sides.tobytes(), part
        if key not in self.made:
            split = len(self.weight) // channels * channels
            ranges = [(0, split, channels), (split, len(self.weight), 1)]
            groups = [self.group(first, last, width, sides, part) for first, last, width in ranges if first < last]
            table, taps = (np.concatenate(arrays) for arrays in zip(*groups))
            size = table["count"] * 4 * (1 + table["width"])
            table["taps"] = taps.ctypes.data + np.cumsum(size) - size
            self.made[key] = Filters(table, taps)
        return self.made[key]

    def group(self, first: int, last: int, width: int, sides: np.ndarray, part: tuple[int, int]) -> Filters:
        """Return the filters of some output channels, `width` channels each."""
        op, source = self.op, self.source
        outputs, inputs, *kernel = self.weight.shape
        weight = self.weight[first:last].reshape(-1, width, inputs, *kernel)
        used = (weight[:, 0] if width == 1 else (weight != 0).any(axis=1))[:, slice(*part)]
        o, c, y, x = np.nonzero(used * (sides >= 0))
        c += part[0]
        table = np.zeros(len(weight), FILTER)
        if self.framed:
            side = sides[y, x]
            order = np.lexsort((side, o))
            o, c, y, x, side = (a[order] for a in (o, c, y, x, side))
            count = np.bincount(o * (SIDES + 1) + side, minlength=len(weight) * (SIDES + 1))
            table["framed"] = count.reshape(-1, SIDES + 1)
        channel = (first + o * width) // (outputs // op.groups) * inputs + c
        offset = channel * source.channel + (y * op.window.dilation[0] - op.window.padding[0]) * source.row
        offset = offset + (x * op.window.dilation[1] - op.window.padding[1]) * source.vector
        taps = np.empty((len(o), 1 + width), np.float32)
        taps[:, 0] = offset.astype(np.int32).view(np.float32)
        taps[:, 1:] = weight[o, :, c, y, x]
        table["count"], table["width"] = np.bincount(o, minlength=len(weight)), width
        table["channel"] = first + np.arange(len(weight)) * width
        return Filters(table, taps.ravel())

    def union(self, channels: int) -> float:
        """Return the average number of taps of a filter of this many channels."""
        if channels == 1:
            return self.op.nonzero / len(self.weight)
        whole = len(self.weight) // channels * channels
        used = (self.weight[:whole].reshape(-1, channels, *self.weight.shape[1:]) != 0).any(axis=1)
        return float(used.sum()) / (whole / channels)


class Layer:
    """A convolution in its layouts, ready to be tiled."""

    def __init__(self, step: "ConvolutionStep", library: Library) -> None:
        self.step, self.library, self.own = step.c, library, step.own
        self.op, self.stride, self.framed = op, stride, framed = step.op, step.stride, step.framed
        self.source, self.output, self.added = step.layouts
        self.taps = Taps(op, self.source, stride, framed)
        self.weight = self.taps.weight
        self.unions: dict[int, float] = {}
        self.rows, self.columns = self.output.visible
        flat = all(layout is None or layout.flat for layout in step.layouts)
        self.flat = flat and op.window.kernel == stride == (1, 1) and self.rows > 1  # are all rows one long row?
        # Tiles of one row or column may leave out taps that only read padding, unless all rows are one.
        grid = self.source.grid
        self.trims = grid.rows == grid.columns == 1 and any(self.source.halo) and not self.flat and not framed
        self.strip = step.strip or self.rows  # rows of a strip
        edges = [*range(0, self.rows, self.strip), self.rows]
        self.row_strips, self.column_strips = edges, [0, self.columns]
        if self.flat:
            self.row_strips, self.column_strips = [0, 1], [edge * self.columns for edge in edges]
            self.rows, self.columns = 1, self.rows * self.columns

    # ---- which tilings there are

    def kernel(self, channels: int, rows: int, columns: int) -> int:
        """Return the number of the kernel for a tile, or -1 if there is none."""
        stride = self.stride[1] if columns > 1 else 1
        kernels = self.library.kernels
        if self.framed:
            return kernels.get(Kernel(channels, rows, columns, 1, 1), -1) if columns == self.columns else -1
        return kernels.get(Kernel(channels, rows, columns, stride), kernels.get(Kernel(channels, rows, columns, 0), -1))

    def possible(self, tiling: Tiling) -> bool:
        heights = {b - a for strip in self.row_cuts(tiling) for a, b in strip}
        widths = {b - a for strip in self.column_cuts(tiling) for a, b in strip}
        per_group = len(self.weight) // self.op.groups
        if tiling.channels > 1 and per_group % tiling.channels and self.op.groups > 1:
            return False
        if tiling.channels > len(self.weight) or (tiling.trimmed and not self.trims):
            return False
        return all(self.kernel(c, h, w) >= 0 for c in {1, tiling.channels} for h in heights for w in widths)

    def row_cuts(self, tiling: Tiling) -> list[list[tuple[int, int]]]:
        """Return, for each strip, the first and last row of its tiles."""
        return [pieces(a, b, tiling.rows) for a, b in pairwise(self.row_strips)]

    def column_cuts(self, tiling: Tiling) -> list[list[tuple[int, int]]]:
        return [pieces(a, b, tiling.columns) for a, b in pairwise(self.column_strips)]

    def candidates(self) -> list[Tiling]:
        """Return all tilings with kernels, the most promising first."""
        rows, columns = self.row_strips[1], self.column_strips[1]  # of a strip
        heights = {-(-rows // n) for n in range(1, rows + 1)}
        widths = {-(-columns // n) for n in range(1, columns + 1)} | {w for w in range(1, LARGEST + 1) if w <= columns}
        channels = {k.channels for k in self.library.kernels}
        found = {Tiling(c, h, w) for c in channels for h in heights for w in widths if c * h * w <= LARGEST}
        if self.trims:
            found |= {tiling._replace(trimmed=True) for tiling in found if 1 in tiling[1:3]}
        found = {tiling for tiling in found if self.possible(tiling)}
        for tiling, size in product(list(found), PARTS):
            parts = math.ceil(self.working_set(tiling) / size)
            if tiling.channels == self.op.groups == 1 < parts < self.op.nonzero / len(self.weight) / FEWEST:
                found.add(tiling._replace(parts=parts))
        return sorted(found, key=self.estimate)

    def shortlist(self) -> list[Tiling]:
        """Return the most promising candidates of each kind."""
        kinds: dict[tuple[bool, bool], list[Tiling]] = {}
        for tiling in self.candidates():
            kinds.setdefault((tiling.trimmed, tiling.parts > 1), []).append(tiling)
        return [tiling for kind in kinds.values() for tiling in kind[:TRIED]]

    def variants(self, tiling: Tiling) -> list[Tiling]:
        """Return a tiling with both orders of its loops, if there is more than one tile."""
        tiles = sum(map(len, self.row_cuts(tiling))) * sum(map(len, self.column_cuts(tiling)))
        return [tiling, tiling._replace(outside=True)] if tiles > tiling.parts == 1 else [tiling]

    def recall(self, remembered: Any) -> Tiling | None:
        """Return the tiling that the tuner remembered, if it is still possible."""
        if not isinstance(remembered, list) or len(remembered) != len(Tiling._fields):
            return None
        channels, rows, columns, trimmed, outside, parts = remembered
        tiling = Tiling(channels, rows, columns, bool(trimmed), bool(outside), parts)
        return tiling if self.possible(tiling) else None

    # ---- a model of the caches

    def working_set(self, tiling: Tiling) -> float:
        """Return the bytes of the input that a tile reads."""
        seen = [
            (n - 1) * stride + (k - 1) * d + 1
            for n, stride, k, d in zip(tiling[1:3], self.stride, self.op.window.kernel, self.op.window.dilation)
        ]
        inputs = self.source.channels / self.op.groups if self.op.groups < self.source.channels else 1
        return inputs * min(math.prod(seen), self.source.rows * self.source.columns) * self.source.vector

    def estimate(self, tiling: Tiling) -> float:
        """Return the estimated cycles per output channel."""
        if tiling.channels not in self.unions:
            self.unions[tiling.channels] = self.taps.union(tiling.channels)
        taps = self.unions[tiling.channels]
        tall, wide = math.ceil(self.rows / tiling.rows), math.ceil(self.columns / tiling.columns)
        seen = self.working_set(tiling) / tiling.parts
        load = 1.0 if seen < 24e3 else 1.2 if seen < 50e3 else 1.5 if seen < 120e3 else 1.8 if seen < 800e3 else 2.5
        positions = float(self.rows * self.columns)
        if tiling.trimmed:  # of 3 taps, one reads padding in the first row and one in the last
            positions *= 1 - 2 / 3 / self.rows if tiling.rows == 1 else 1.0
            positions *= 1 - 2 / 3 / self.columns if tiling.columns == 1 else 1.0
        work = taps * positions * max(load, tiling.channels) + taps * tall * wide * (1 + tiling.channels)
        return (work + tiling.parts * tall * wide * 25) / tiling.channels + (4 * tiling.parts - 1) * positions

    # ---- the tables that C reads

    def fill(self, tiling: Tiling) -> None:
        """Write tiles, filters and taps into the C struct."""
        tiles: list[tuple[int, ...]] = []
        numbers: dict[tuple[bytes, int], int] = {}  # of the tiles' filters
        strips: list[int] = []
        filters: list[Filters] = []
        parts = pieces(0, self.weight.shape[1], -(-self.weight.shape[1] // tiling.parts))
        for rows, columns in product(self.row_cuts(tiling), self.column_cuts(tiling)):
            strips.append(len(tiles))
            for (a, b), (c, d) in product(rows, columns):
                starts = self.starts(a, c)
                kernels = [self.kernel(n, b - a, d - c) for n in (tiling.channels, 1)]
                sides = np.zeros(self.op.window.kernel, np.int8)
                if self.framed or tiling.trimmed:
                    sides = self.taps.sides(a, b, c, d)
                for part in parts:
                    if (key := (sides.tobytes(), part[0])) not in numbers:
                        numbers[key] = len(numbers)
                        filters.append(self.taps.filters(tiling.channels, sides, part))
                    ends = part is parts[0], part is parts[-1]
                    tiles.append((*starts, b - a, d - c, *kernels, *ends, numbers[key]))
        self.write(tiling, np.array(tiles, TILE), np.array([*strips, len(tiles)], np.int64), filters)

    def starts(self, row: int, column: int) -> tuple[int, int, int]:
        """Return where a tile begins in the input, the output and the added value, in bytes."""
        source, output, added = self.source, self.output, self.added
        start_in = row * self.stride[0] * source.row + column * self.stride[1] * source.vector
        start_add = row * added.row + column * added.vector if added else 0
        return start_in, row * output.row + column * output.vector, start_add

    def write(self, tiling: Tiling, tiles: np.ndarray, strips: np.ndarray, filters: list[Filters]) -> None:
        first = filters[0].table
        tiles["filters"] *= len(first)
        work = first["width"] * sum(table["count"] + 4 for table, _ in filters)
        tables = {
            "tiles": tiles,
            "strips": strips,
            "filters": np.concatenate([table for table, _ in filters]),
            "bias": self.op.bias.astype(np.float32),
            "cost": np.concatenate([[0], np.cumsum(work)]).astype(np.int64),
        }
        for name, array in tables.items():
            setattr(self.own, name, array.ctypes.data)
        self.own.tile_count, self.own.strip_count, self.own.filter_count = len(tiles), len(strips) - 1, len(first)
        self.own.filters_outside = tiling.outside
        self.tap_bytes = sum(taps.nbytes for _, taps in filters)
        self.arrays = [*tables.values(), *(taps for _, taps in filters)]

    @property
    def signature(self) -> str:
        """What the best tiling depends on, as a key of the tuner's memory."""
        op, taps = self.op, round(8 * math.log2(1 + self.op.nonzero))
        parts = (self.weight.shape, op.groups, *op.window, self.stride, taps, len(op.inputs), self.strip, self.framed)
        forms = ((x.height, x.width, *x.grid, *x.halo) for x in (self.source, self.output))
        return repr((parts, *forms)).replace(" ", "")
