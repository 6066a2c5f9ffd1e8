"""Which tile suits a convolution: a short list by a model of the caches, the best of it by timing, remembered on disk."""

import json
import math
import os
import tempfile
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from optg.deploy.engine import structs
from optg.deploy.engine.build import Kernel, Library, cache
from optg.deploy.engine.layout import Layout
from optg.deploy.engine.net import Conv
from optg.deploy.engine.structs import FILTER, TILE, Step

TRIED = 6  # candidates that are timed
RUNS = 5


class Tiling(NamedTuple):
    """Channels that share taps, rows and columns of a tile, and whether filters are the outer loop."""

    channels: int
    rows: int
    columns: int
    outside: bool


def cuts(size: int, most: int) -> list[int]:
    """Where pieces of nearly equal size, at most `most`, begin and end."""
    pieces = math.ceil(size / most)
    return [size * i // pieces for i in range(pieces + 1)]


class Layer:
    """A convolution in its layouts, ready to be tiled."""

    def __init__(self, step: Step, op: Conv, source: Layout, output: Layout, added: Layout | None, library: Library) -> None:
        self.step, self.op, self.source, self.output, self.added, self.library = step, op, source, output, added, library
        self.weight = op.weight.astype(np.float32)
        self.stride = (step.stride_row, step.stride_column)
        self.rows, self.columns = output.visible
        flat = all(layout is None or layout.flat for layout in (source, output, added))
        self.flat = flat and op.window.kernel == (1, 1) and self.stride == (1, 1) and self.rows > 1
        if self.flat:
            self.rows, self.columns = 1, self.rows * self.columns

    def kernel(self, channels: int, rows: int, columns: int) -> int:
        stride = self.stride[1] if columns > 1 else 1
        kernels = self.library.kernels
        return kernels.get(Kernel(channels, rows, columns, stride), kernels.get(Kernel(channels, rows, columns, 0), -1))

    def possible(self, tiling: Tiling) -> bool:
        heights = {b - a for a, b in pairwise(cuts(self.rows, tiling.rows))}
        widths = {b - a for a, b in pairwise(cuts(self.columns, tiling.columns))}
        per_group = len(self.weight) // self.op.groups
        if tiling.channels > 1 and per_group % tiling.channels and self.op.groups > 1:
            return False
        if tiling.channels > len(self.weight):
            return False
        return all(self.kernel(c, h, w) >= 0 for c in {1, tiling.channels} for h in heights for w in widths)

    def candidates(self) -> list[Tiling]:
        """All tilings there are kernels for, the most promising first."""
        heights = {-(-self.rows // n) for n in range(1, self.rows + 1)}
        widths = {-(-self.columns // n) for n in range(1, self.columns + 1)}
        widths |= {w for w in range(1, 29) if w <= self.columns}
        channels = {k.channels for k in self.library.kernels}
        found = {Tiling(c, h, w, False) for c in channels for h in heights for w in widths if c * h * w <= 28}
        return sorted((t for t in found if self.possible(t)), key=self.estimate)

    def union(self, channels: int) -> float:
        """Taps of a filter of so many channels, on average."""
        if channels == 1:
            return self.op.nonzero / len(self.weight)
        whole = len(self.weight) // channels * channels
        some = (self.weight[:whole].reshape(-1, channels, *self.weight.shape[1:]) != 0).any(axis=1)
        return float(some.sum()) / (whole / channels)

    def estimate(self, tiling: Tiling) -> float:
        """Cycles per output channel."""
        if not hasattr(self, "unions"):
            self.unions: dict[int, float] = {}
        taps = self.unions.setdefault(tiling.channels, self.union(tiling.channels))
        tall, wide = math.ceil(self.rows / tiling.rows), math.ceil(self.columns / tiling.columns)
        seen_rows = (tiling.rows - 1) * self.stride[0] + (self.op.window.kernel[0] - 1) * self.op.window.dilation[0] + 1
        seen_columns = (tiling.columns - 1) * self.stride[1] + (self.op.window.kernel[1] - 1) * self.op.window.dilation[1] + 1
        inputs = self.source.channels / self.op.groups if self.op.groups < self.source.channels else 1
        working_set = inputs * min(seen_rows * seen_columns, self.source.rows * self.source.columns) * self.source.vector
        load = 1.0 if working_set < 24e3 else 1.3 if working_set < 100e3 else 1.8 if working_set < 800e3 else 2.5
        positions = self.rows * self.columns
        work = taps * positions * max(load, tiling.channels) + taps * tall * wide * (1 + tiling.channels)
        return (work + tall * wide * 25) / tiling.channels + 3 * positions

    def fill(self, tiling: Tiling) -> None:
        """Write tiles, filters and taps into the step."""
        step, source, output, added = self.step, self.source, self.output, self.added
        tiles = []
        for a, b in pairwise(cuts(self.rows, tiling.rows)):
            for c, d in pairwise(cuts(self.columns, tiling.columns)):
                start_in = a * self.stride[0] * source.row + c * self.stride[1] * source.vector
                start_add = a * added.row + c * added.vector if added else 0
                shape = (b - a, d - c)
                tiles.append(
                    (start_in, a * output.row + c * output.vector, start_add, *shape)
                    + (self.kernel(tiling.channels, *shape), self.kernel(1, *shape))
                )
        step.keep("tiles", np.array(tiles, TILE))
        step.tile_count = len(tiles)
        step.filters_outside = int(tiling.outside)
        bias = self.op.bias.astype(np.float32)
        step.keep("bias", bias)
        self.fill_filters(tiling.channels)

    def fill_filters(self, channels: int) -> None:
        step, op, source = self.step, self.op, self.source
        outputs, inputs, height, width = self.weight.shape
        whole = outputs // channels
        split = whole * channels
        blocks, counts, widths = [], [], []
        for part, group in ((self.weight[:split], channels), (self.weight[split:], 1)):
            if not len(part):
                continue
            part = part.reshape(-1, group, inputs, height, width)
            o, c, y, x = np.nonzero((part != 0).any(axis=1))
            first = (
                o * group // (outputs // op.groups) * inputs
                if group == channels
                else (o + split) // (outputs // op.groups) * inputs
            )
            offset = (first + c) * source.channel + (y * op.window.dilation[0] - op.window.padding[0]) * source.row
            offset = offset + (x * op.window.dilation[1] - op.window.padding[1]) * source.vector
            taps = np.empty((len(o), 1 + group), np.float32)
            taps[:, 0] = offset.astype(np.int32).view(np.float32)
            taps[:, 1:] = part[o, :, c, y, x]
            blocks.append(taps.ravel())
            counts.append(np.bincount(o, minlength=len(part)))
            widths.append(np.full(len(part), group))
        taps, count, wide = np.concatenate(blocks), np.concatenate(counts), np.concatenate(widths)
        filters = np.zeros(len(count), FILTER)
        size = count * 4 * (1 + wide)
        step.keep("weights", taps)
        filters["taps"] = taps.ctypes.data + np.cumsum(size) - size
        filters["count"], filters["width"] = count, wide
        filters["channel"] = np.cumsum(wide) - wide
        step.keep("filters", filters)
        step.filter_count = len(filters)
        step.keep("cost", np.concatenate([[0], np.cumsum(count * wide + 4 * wide)]).astype(np.int64))

    @property
    def signature(self) -> str:
        op, taps = self.op, round(8 * math.log2(1 + self.op.nonzero))
        source, output = self.source, self.output
        parts = (self.weight.shape, op.groups, *vars(op.window).values(), self.stride, taps, len(op.inputs))
        forms = ((x.height, x.width, *x.grid, *x.halo) for x in (source, output))
        return repr((parts, *forms)).replace(" ", "")


class Tuner:
    """Chooses tilings and remembers them, for each build of the engine in a file of its own."""

    def __init__(self, library: Library) -> None:
        self.library = library
        self.path = cache() / f"tiles-{library.key.removeprefix('engine-')}.json"
        self.known: dict[str, list[int]] = {}
        self.changed = False
        try:
            self.known = json.loads(self.path.read_text())
        except (OSError, ValueError):
            pass

    def choose(self, step: Step, op: Conv, source: Layout, output: Layout, added: Layout | None, arena: int) -> Tiling:
        layer = Layer(step, op, source, output, added, self.library)
        signature = layer.signature
        remembered = self.known.get(signature)
        if remembered and len(remembered) == 4:
            tiling = Tiling(*remembered[:3], bool(remembered[3]))
            if layer.possible(tiling):
                layer.fill(tiling)
                return tiling
        candidates = layer.candidates()
        tried = candidates[:TRIED]
        if len(tried) > 1:
            tiling = min(tried, key=lambda t: self.time(layer, t, arena))
            other = tiling._replace(outside=True)
            if step.tile_count > 1 and self.time(layer, other, arena) < self.time(layer, tiling, arena):
                tiling = other
            self.known[signature] = [tiling.channels, tiling.rows, tiling.columns, int(tiling.outside)]
            self.changed = True
        else:
            tiling = tried[0]
        layer.fill(tiling)
        return tiling

    def time(self, layer: Layer, tiling: Tiling, arena: int) -> int:
        layer.fill(tiling)
        inputs = structs.pointers([])
        return self.library.c.engine_time(structs.address(layer.step), arena, structs.address(inputs), 0, RUNS)

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
