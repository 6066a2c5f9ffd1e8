"""Which tile suits a convolution: a short list by a model of the caches, the best of it by timing, remembered on disk."""

import contextlib
import hashlib
import json
import math
import os
import tempfile
from collections.abc import Callable, Sequence
from itertools import pairwise, product
from typing import Any, NamedTuple, TypeVar

import numpy as np

from optg.deploy.engine import structs
from optg.deploy.engine.build import Kernel, Library, cache
from optg.deploy.engine.layout import Grid, Layout
from optg.deploy.engine.net import Conv, Shape
from optg.deploy.engine.structs import FILTER, SIDES, TILE, Step

Choice = TypeVar("Choice")
TRIED = 6  # candidates that are timed
ROUNDS, RUNS = 2, 3  # of all candidates, and of one in a round: a slow moment of the machine meets few of them
FETCHED = 20.0  # bytes per nanosecond
PARTS = 45e3, 110e3  # bytes of the input that a tile had better see at once: some more than the first cache holds
FEWEST = 4  # taps of a filter in a part
FRAMED = 0.3  # density above which channels had better share their loads


class Tiling(NamedTuple):
    """Channels that share taps, and rows and columns of a tile."""

    channels: int
    rows: int
    columns: int
    trimmed: bool = False  # are taps that see only padding left out?
    outside: bool = False  # are filters the outer loop, not tiles?
    parts: int = 1  # of the input's channels, one after the other


def pieces(first: int, last: int, most: int) -> list[tuple[int, int]]:
    """A range in pieces of nearly equal size, at most `most`."""
    n = math.ceil((last - first) / most)
    return list(pairwise(first + (last - first) * i // n for i in range(n + 1)))


def can_be_framed(op: Conv, source: Shape, output: Shape, grid: Grid, library: Library) -> bool:
    """Are there kernels for whole rows of this image that leave out the padding? Then the input needs no halo."""
    window = op.window
    ends = [(k - 1) * d - p for k, d, p in zip(window.kernel, window.dilation, window.padding)]
    narrow = all(0 <= n <= 1 for n in (*window.padding, *ends)) and any(window.padding)
    alone = grid.rows == grid.columns == 1 and window.stride == (1, 1) and source[1:] == output[1:]
    sparse = op.nonzero < FRAMED * op.weight.size
    _, height, width = output
    known = {kernel.rows for kernel in library.kernels if kernel.framed and kernel.columns == width}
    return narrow and alone and sparse and any({b - a for a, b in pieces(0, height, rows)} <= known for rows in known)


class Layer:
    """A convolution in its layouts, ready to be tiled."""

    def __init__(
        self, step: Step, op: Conv, source: Layout, output: Layout, added: Layout | None, library: Library, strip: int | None,
        framed: bool,
    ) -> None:  # fmt: skip
        self.step, self.op, self.source, self.output, self.added, self.library = step, op, source, output, added, library
        self.weight = op.weight.astype(np.float32)
        self.stride = (step.stride_row, step.stride_column)
        self.rows, self.columns = output.visible
        flat = all(layout is None or layout.flat for layout in (source, output, added))
        self.flat = flat and op.window.kernel == (1, 1) and self.stride == (1, 1) and self.rows > 1
        self.made: dict[tuple[int, bytes, tuple[int, int]], tuple[np.ndarray, np.ndarray]] = {}
        self.unions: dict[int, float] = {}
        self.framed = framed
        # may tiles of one row or column leave out what sees only padding? Not where rows follow each other as one
        self.trims = source.grid.rows == source.grid.columns == 1 and any(source.halo) and not self.flat and not framed
        self.strip = strip or self.rows  # rows of a strip
        edges = [*range(0, self.rows, self.strip), self.rows]
        self.row_strips, self.column_strips = edges, [0, self.columns]
        if self.flat:
            self.row_strips, self.column_strips = [0, 1], [edge * self.columns for edge in edges]
            self.rows, self.columns = 1, self.rows * self.columns

    def kernel(self, channels: int, rows: int, columns: int) -> int:
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
        """For each strip of rows, the first and last row of its tiles."""
        return [pieces(a, b, tiling.rows) for a, b in pairwise(self.row_strips)]

    def column_cuts(self, tiling: Tiling) -> list[list[tuple[int, int]]]:
        return [pieces(a, b, tiling.columns) for a, b in pairwise(self.column_strips)]

    def candidates(self) -> list[Tiling]:
        """All tilings there are kernels for, the most promising first."""
        rows, columns = self.row_strips[1], self.column_strips[1]  # of a strip
        heights = {-(-rows // n) for n in range(1, rows + 1)}
        widths = {-(-columns // n) for n in range(1, columns + 1)} | {w for w in range(1, 29) if w <= columns}
        channels = {k.channels for k in self.library.kernels}
        found = {Tiling(c, h, w) for c in channels for h in heights for w in widths if c * h * w <= 28}
        if self.trims:
            found |= {tiling._replace(trimmed=True) for tiling in found if 1 in tiling[1:3]}
        found = {tiling for tiling in found if self.possible(tiling)}
        for tiling, size in product(list(found), PARTS):
            parts = math.ceil(self.working_set(tiling) / size)
            if tiling.channels == self.op.groups == 1 < parts < self.op.nonzero / len(self.weight) / FEWEST:
                found.add(tiling._replace(parts=parts))
        return sorted(found, key=self.estimate)

    def union(self, channels: int) -> float:
        """Taps of a filter of so many channels, on average."""
        if channels == 1:
            return self.op.nonzero / len(self.weight)
        whole = len(self.weight) // channels * channels
        some = (self.weight[:whole].reshape(-1, channels, *self.weight.shape[1:]) != 0).any(axis=1)
        return float(some.sum()) / (whole / channels)

    def working_set(self, tiling: Tiling) -> float:
        """Bytes of the input that a tile sees."""
        seen = [
            (n - 1) * stride + (k - 1) * d + 1
            for n, stride, k, d in zip(tiling[1:3], self.stride, self.op.window.kernel, self.op.window.dilation)
        ]
        inputs = self.source.channels / self.op.groups if self.op.groups < self.source.channels else 1
        return inputs * min(math.prod(seen), self.source.rows * self.source.columns) * self.source.vector

    def estimate(self, tiling: Tiling) -> float:
        """Cycles per output channel."""
        if tiling.channels not in self.unions:
            self.unions[tiling.channels] = self.union(tiling.channels)
        taps = self.unions[tiling.channels]
        tall, wide = math.ceil(self.rows / tiling.rows), math.ceil(self.columns / tiling.columns)
        seen = self.working_set(tiling) / tiling.parts
        load = 1.0 if seen < 24e3 else 1.2 if seen < 50e3 else 1.5 if seen < 120e3 else 1.8 if seen < 800e3 else 2.5
        positions = float(self.rows * self.columns)
        if tiling.trimmed:  # of 3 taps, one sees padding in the first row and one in the last
            positions *= 1 - 2 / 3 / self.rows if tiling.rows == 1 else 1.0
            positions *= 1 - 2 / 3 / self.columns if tiling.columns == 1 else 1.0
        work = taps * positions * max(load, tiling.channels) + taps * tall * wide * (1 + tiling.channels)
        return (work + tiling.parts * tall * wide * 25) / tiling.channels + (4 * tiling.parts - 1) * positions

    def fill(self, tiling: Tiling) -> None:
        """Write tiles, filters and taps into the step."""
        step, source, output, added = self.step, self.source, self.output, self.added
        tiles: list[tuple[int, ...]] = []
        sets: dict[tuple[bytes, int], int] = {}
        strips, made = [], []
        parts = pieces(0, self.weight.shape[1], -(-self.weight.shape[1] // tiling.parts))
        for rows, columns in product(self.row_cuts(tiling), self.column_cuts(tiling)):
            strips.append(len(tiles))
            for (a, b), (c, d) in product(rows, columns):
                start_in = a * self.stride[0] * source.row + c * self.stride[1] * source.vector
                start_add = a * added.row + c * added.vector if added else 0
                start_out = a * output.row + c * output.vector
                kernels = [self.kernel(n, b - a, d - c) for n in (tiling.channels, 1)]
                seen = np.zeros(self.op.window.kernel, np.int8)
                if self.framed or tiling.trimmed:
                    seen = self.seen(a, b, c, d)
                for part in parts:
                    if (key := (seen.tobytes(), part[0])) not in sets:
                        sets[key] = len(sets)
                        made.append(self.filters(tiling.channels, seen, part))
                    ends = part is parts[0], part is parts[-1]
                    tiles.append((start_in, start_out, start_add, b - a, d - c, *kernels, *ends, sets[key]))
        step.keep("tiles", np.array(tiles, TILE))
        step.kept["tiles"]["filters"] *= len(made[0][0])
        step.tile_count = len(tiles)
        step.keep("strips", np.array([*strips, len(tiles)], np.int64))
        step.strip_count = len(strips)
        step.filters_outside = int(tiling.outside)
        step.keep("bias", self.op.bias.astype(np.float32))
        filters = np.concatenate([filters for filters, _ in made])
        step.keep("filters", filters)
        step.kept["taps"] = [taps for _, taps in made]
        step.filter_count = len(made[0][0])
        work = made[0][0]["width"] * sum(filters["count"] + 4 for filters, _ in made)
        step.keep("cost", np.concatenate([[0], np.cumsum(work)]).astype(np.int64))

    def seen(self, top: int, bottom: int, left: int, right: int) -> np.ndarray:
        """For each tap of the kernel: which part of a tile sees pixels, as `SIDES` counts, or -1 if none does."""
        kinds = []
        for axis, (first, last) in enumerate(((top, bottom), (left, right))):
            window, size = self.op.window, (self.source.height, self.source.width)[axis]
            tap = np.arange(window.kernel[axis])[:, None] * window.dilation[axis] - window.padding[axis]
            pixel = np.arange(first, last) * self.stride[axis] + tap
            inside = (pixel >= 0) & (pixel < size)
            kind = np.where(inside[:, 0], np.where(inside[:, -1], 0, 2), 1)
            kinds.append(np.where(inside.any(axis=1), kind, -1))
        rows, columns = kinds[0][:, None], kinds[1][None, :]
        return np.where((rows < 0) | (columns < 0), -1, 3 * rows + columns).astype(np.int8)

    def filters(self, channels: int, seen: np.ndarray, part: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
        """The filters of groups of so many channels, and of those left over one by one; their taps in a part of the input."""
        key = channels, seen.tobytes(), part
        if key not in self.made:
            self.made[key] = self.make_filters(channels, seen, part)
        return self.made[key]

    def make_filters(self, channels: int, seen: np.ndarray, inputs_seen: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
        op, source = self.op, self.source
        outputs, inputs, height, width = self.weight.shape
        split = outputs // channels * channels
        blocks, parts = [], []
        for first, part, group in ((0, self.weight[:split], channels), (split, self.weight[split:], 1)):
            if not len(part):
                continue
            part = part.reshape(-1, group, inputs, height, width)
            some = (part[:, 0] if group == 1 else (part != 0).any(axis=1))[:, slice(*inputs_seen)]
            o, c, y, x = np.nonzero(some * (seen >= 0))
            c += inputs_seen[0]
            filters = np.zeros(len(part), FILTER)
            if self.framed:
                side = seen[y, x]
                order = np.lexsort((side, o))
                o, c, y, x, side = (a[order] for a in (o, c, y, x, side))
                count = np.bincount(o * (SIDES + 1) + side, minlength=len(part) * (SIDES + 1))
                filters["framed"] = count.reshape(-1, SIDES + 1)
            channel = (first + o * group) // (outputs // op.groups) * inputs + c
            offset = channel * source.channel + (y * op.window.dilation[0] - op.window.padding[0]) * source.row
            offset = offset + (x * op.window.dilation[1] - op.window.padding[1]) * source.vector
            taps = np.empty((len(o), 1 + group), np.float32)
            taps[:, 0] = offset.astype(np.int32).view(np.float32)
            taps[:, 1:] = part[o, :, c, y, x]
            filters["count"], filters["width"] = np.bincount(o, minlength=len(part)), group
            filters["channel"] = first + np.arange(len(part)) * group
            blocks.append(taps.ravel())
            parts.append(filters)
        taps, filters = np.concatenate(blocks), np.concatenate(parts)
        size = filters["count"] * 4 * (1 + filters["width"])
        filters["taps"] = taps.ctypes.data + np.cumsum(size) - size
        return filters, taps

    @property
    def signature(self) -> str:
        op, taps = self.op, round(8 * math.log2(1 + self.op.nonzero))
        source, output = self.source, self.output
        parts = (
            self.weight.shape,
            op.groups,
            *vars(op.window).values(),
            self.stride,
            taps,
            len(op.inputs),
            self.strip,
            self.framed,
        )
        forms = ((x.height, x.width, *x.grid, *x.halo) for x in (source, output))
        return repr((parts, *forms)).replace(" ", "")


def fastest(choices: Sequence[Choice], time: Callable[[Choice], float]) -> Choice:
    """The one with the shortest time, all taking turns."""
    rounds = [[time(choice) for choice in choices] for _ in range(ROUNDS)]
    return choices[int(np.argmin(np.min(rounds, axis=0)))]


class Tuner:
    """Chooses tilings and remembers them, for each build of the engine in a file of its own."""

    def __init__(self, library: Library) -> None:
        self.library = library
        self.path = cache() / f"tiles-{library.key.removeprefix('engine-')}.json"
        self.known: dict[str, list[int]] = {}
        self.changed = False
        with contextlib.suppress(OSError, ValueError):
            known = json.loads(self.path.read_text())
            self.known = known if isinstance(known, dict) else {}

    def choose(self, layer: Layer, arena: int) -> Tiling:
        step, signature = layer.step, layer.signature
        remembered = self.known.get(signature)
        if remembered and len(remembered) == len(Tiling._fields):
            channels, rows, columns, trimmed, outside, parts = remembered
            tiling = Tiling(channels, rows, columns, bool(trimmed), bool(outside), parts)
            if layer.possible(tiling):
                layer.fill(tiling)
                return tiling
        candidates = layer.candidates()
        kinds: dict[tuple[bool, bool], list[Tiling]] = {}
        for tiling in candidates:
            kinds.setdefault((tiling.trimmed, tiling.parts > 1), []).append(tiling)
        tried = [tiling for kind in kinds.values() for tiling in kind[:TRIED]]
        if len(tried) > 1:
            tiling = fastest(tried, lambda t: self.time(layer, t, arena))
            layer.fill(tiling)
            if step.tile_count > tiling.parts == 1:
                tiling = fastest([tiling, tiling._replace(outside=True)], lambda t: self.time(layer, t, arena))
            self.known[signature] = [int(value) for value in tiling]
            self.changed = True
        else:
            tiling = tried[0]
        layer.fill(tiling)
        return tiling

    def time(self, layer: Layer, tiling: Tiling, arena: int) -> float:
        """Nanoseconds with warm caches, and what it takes to fetch the taps: in a whole network they come from afar."""
        layer.fill(tiling)
        inputs = structs.pointers([])
        warm = self.library.c.engine_time(structs.address(layer.step), arena, structs.address(inputs), 0, RUNS)
        return warm + sum(taps.nbytes for taps in layer.step.kept["taps"]) / FETCHED

    def known_cut(self, segment: Any, images: int) -> int | None:
        known = self.known.get(cut_signature(segment, images))
        return known[0] if known else None

    def remember_cut(self, segment: Any, images: int, cut: int) -> None:
        self.known[cut_signature(segment, images)] = [cut]
        self.changed = True

    def save(self) -> None:
        if not self.changed:
            return
        try:
            handle, temporary = tempfile.mkstemp(dir=self.path.parent)
            with os.fdopen(handle, "w") as file:
                json.dump(self.known, file)
            os.replace(temporary, self.path)
        except OSError:
            pass  # to remember is a convenience
        self.changed = False


def cut_signature(segment: Any, images: int) -> str:
    layers = [
        (type(op).__name__, segment.shapes[op.output], round(4 * math.log2(1 + op.nonzero)) if isinstance(op, Conv) else 0)
        for op in segment.ops
    ]
    return f"cut {images} {hashlib.sha256(repr(layers).encode()).hexdigest()[:16]}"
