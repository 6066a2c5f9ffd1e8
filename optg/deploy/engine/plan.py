"""A part of a network and a batch size -> a program: layouts, memory, steps.

A *group* is what one thread carries through the network: one image, cut into as many blocks as a vector has lanes, or as many
images as there are lanes. In a group of images the first operations may run image by image, where an image alone fits into
the caches; at `cut` the images are put side by side, each into its own lane.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from optg.deploy.engine import structs
from optg.deploy.engine.build import Library
from optg.deploy.engine.layout import NO_HALO, Grid, Halo, Layout, best_grid
from optg.deploy.engine.net import ACTIVATIONS, INFINITY, Concat, Conv, Mean, Op, Pair, Pointwise, Pool, Shape, Softmax
from optg.deploy.engine.structs import ARENA, HANDED_IN, Section, Step, View
from optg.deploy.engine.tune import Layer, Tiling, Tuner, can_be_framed

PAGE = 4096
SIDE_BY_SIDE = 8 << 20  # bytes of a value
SHARED = 100_000  # multiply-adds of a step, on average, below which threads would wait for each other longer than they work
CHAINED, STRIP = 2 << 20, 384 << 10  # bytes of a value that is made in strips, and of a strip


@dataclass
class Segment:
    """Operations that run one after the other without torch in between."""

    ops: list[Op]
    inputs: list[str]  # made elsewhere
    outputs: list[str]  # used elsewhere
    shapes: dict[str, Shape]


@dataclass(eq=False)
class Place:
    """One copy of a value in the arena: its layout, when it is needed, and where it lies."""

    value: str
    layout: Layout
    images: int
    every: int = 1  # only every so-many-th row and column of the value
    made: bool = False
    born: int = 0
    dies: int = -1
    offset: int = -1
    shares: "Place | None" = None  # writes over another place, which it alone still reads

    def merge(self, halo: Halo, fill: float | None) -> None:
        fill = self.layout.fill if fill is None else fill
        self.layout = self.layout.with_halo(self.layout.halo.union(halo), fill)

    @property
    def home(self) -> "Place":
        return self if self.shares is None else self.shares.home


@dataclass
class Use:
    """What an operation works on: its inputs' places, its output's, and how it sees the first input."""

    inputs: list[Place]
    output: Place
    stride: Pair = (1, 1)


def cuts(segment: Segment, images: int) -> list[int]:
    """Where a group of images may go from one by one to side by side: where the image's size changes, or not at all.

    Side by side, the largest value should still find room in the last cache. What a pool leaves is less to put there than what
    it takes.
    """
    sizes = [segment.shapes[op.output] for op in segment.ops]
    found = {len(sizes)}
    for i in range(len(sizes) - 1, -1, -1):
        used = [segment.shapes[name] for name in segment.ops[i].inputs]
        if max(4 * images * c * h * w for c, h, w in [sizes[i], *used]) > SIDE_BY_SIDE:
            break
        if i == 0 or sizes[i][1:] != sizes[i - 1][1:]:
            found.add(i + isinstance(segment.ops[i], Pool))
    return sorted(found, reverse=True)


class Program:
    """The steps for one group of images; `run` repeats them for all groups of a batch."""

    def __init__(self, segment: Segment, images: int, cut: int, library: Library, tuner: Tuner) -> None:
        self.segment, self.images, self.library, self.tuner = segment, images, library, tuner
        self.cut = 0 if images == 1 else cut
        self.places: dict[tuple[str, int], list[Place]] = {}
        self.steps: list[Step] = []
        self.touched: list[list[Place]] = []
        self.labels: list[tuple[Op | None, str]] = []
        self.tilings: dict[str, Tiling] = {}
        self.framed: set[str] = set()  # outputs of convolutions whose taps leave out the padding
        self.border = 0
        uses = [self.layouts(op, self.at_once(i)) for i, op in enumerate(segment.ops)]
        for i, (op, use) in enumerate(zip(segment.ops, uses)):
            if i == self.cut:
                self.put_side_by_side()
            self.emit(op, use, self.at_once(i))
            for name in [v for v in [op.output] if v in segment.outputs]:
                self.unpack(name, self.at_once(i))
        if self.cut == len(segment.ops):
            self.border = len(self.steps)
        self.strips = self.chains()
        self.size = self.allocate(uses)
        self.resolve()
        self.tune()
        self.sections = self.freeze()
        work = sum(
            op.nonzero * segment.shapes[op.output][1] * segment.shapes[op.output][2]
            for op in segment.ops
            if isinstance(op, Conv)
        )
        self.shared = images * work > SHARED * len(self.steps)  # should threads share the work of one group?

    def at_once(self, index: int) -> int:
        """How many images an operation works on together."""
        return 1 if index < self.cut else self.images

    # ---- layouts: what each operation wants of its inputs

    def primary(self, name: str, images: int) -> Place | None:
        return next(iter(self.places.get((name, images), [])), None)

    def want(
        self, name: str, images: int, grid: Grid, rows: int, columns: int,
        halo: Halo = NO_HALO, fill: float | None = None, every: int = 1,
    ) -> Place:  # fmt: skip
        """A place of this value with that grid, halo and fill: one that is wanted already, or a new one."""
        known = self.places.setdefault((name, images), [])
        for place in known:
            layout = place.layout
            if (layout.grid, layout.rows, layout.columns, place.every) != (grid, rows, columns, every):
                continue
            if fill is None or layout.fill is None or layout.fill == fill:
                place.merge(halo, fill)
                return place
        channels, height, width = self.segment.shapes[name]
        height, width = -(-height // every), -(-width // every)
        known.append(
            Place(name, Layout(channels, height, width, grid, rows, columns, self.library.lanes, halo, fill), images, every)
        )
        return known[-1]

    def grid(self, shape: Shape, images: int) -> tuple[Grid, int, int]:
        grid = best_grid(shape[1], shape[2], images, self.library.lanes)
        return grid, -(-shape[1] // grid.rows), -(-shape[2] // grid.columns)

    def found(self, name: str, images: int) -> tuple[Grid, int, int]:
        """The grid that a value has, or will get; a place of some of its pixels is none of the value."""
        for place in self.places.get((name, images), []):
            if place.every == 1:
                return place.layout.grid, place.layout.rows, place.layout.columns
        return self.grid(self.segment.shapes[name], images)

    def layouts(self, op: Op, images: int) -> Use:
        shape = self.segment.shapes[op.output]
        if isinstance(op, (Conv, Pool)):
            return self.windowed(op, shape, images)
        if isinstance(op, Mean):
            inputs = [self.want(op.inputs[0], images, *self.found(op.inputs[0], images))]
            return Use(inputs, self.want(op.output, images, Grid(images, 1, 1), 1, 1))
        form = self.found(op.inputs[0], images)
        inputs = [self.want(name, images, *form) for name in op.inputs]
        return Use(inputs, self.want(op.output, images, *form))

    def windowed(self, op: Conv | Pool, shape: Shape, images: int) -> Use:
        name, window = op.inputs[0], op.window
        source = self.segment.shapes[name]
        stride = window.stride
        grid, rows, columns = self.grid(shape, images)
        if window.kernel == source[1:] and shape[1:] == (1, 1) and window.padding == (0, 0):
            grid, rows, columns, stride = Grid(images, 1, 1), 1, 1, source[1:]  # one block: the whole image
        else:  # the input's own grid, if that makes no more vectors
            own, own_rows, own_columns = self.found(name, images)
            r, c = own_rows // stride[0], own_columns // stride[1]
            fits = (
                own_rows % stride[0] == own_columns % stride[1] == 0
                and own.rows * r >= shape[1]
                and own.columns * c >= shape[2]
            )
            if fits and r * c <= rows * columns:
                grid, rows, columns = own, r, c
        rows = max(rows, -(-source[1] // (grid.rows * stride[0])))
        columns = max(columns, -(-source[2] // (grid.columns * stride[1])))
        output = self.want(op.output, images, grid, rows, columns)
        in_rows, in_columns = rows * stride[0], columns * stride[1]
        every = 1
        skips = window.kernel == (1, 1) and window.padding == (0, 0) and stride[0] == stride[1] > 1
        if skips and self.found(name, images) != (grid, in_rows, in_columns):  # copied anyway: copy only what is seen
            every, stride, in_rows, in_columns = stride[0], (1, 1), rows, columns
        top, bottom = window.reach(min(rows, shape[1]), in_rows, 0)
        left, right = window.reach(min(columns, shape[2]), in_columns, 1)
        if every > 1:
            top = bottom = left = right = 0
        halo = Halo(top, bottom, left, right)
        beyond = [
            (n - 1) * s - p + (k - 1) * d >= size
            for n, s, p, k, d, size in zip(shape[1:], window.stride, window.padding, window.kernel, window.dilation, source[1:])
        ]
        framed = isinstance(op, Conv) and can_be_framed(op, source, shape, grid, self.library)
        if framed:  # its taps see no padding
            self.framed.add(op.output)
            halo = NO_HALO
        fill = None
        if not framed and (any(halo) or any(beyond)):
            fill = -INFINITY if isinstance(op, Pool) and op.kind == "max" else 0.0
        inputs = [self.want(name, images, grid, in_rows, in_columns, halo, fill, every)]
        inputs += [self.want(other, images, grid, rows, columns) for other in op.inputs[1:]]
        return Use(inputs, output, stride)

    # ---- steps

    def add_step(self, kind: int, places: Sequence[Place], op: Op | None, label: str) -> Step:
        step = Step(kind=kind, low=-INFINITY, high=INFINITY)
        self.steps.append(step)
        self.touched.append(list(places))
        self.labels.append((op, label))
        for place in places:
            place.home.dies = max(place.home.dies, len(self.steps) - 1)
            if not place.made:
                place.made, place.born = True, len(self.steps) - 1
        return step

    def handed_in(self, name: str) -> int:
        return HANDED_IN + [*self.segment.inputs, *self.segment.outputs].index(name)

    def external(self, name: str, images: int) -> View:
        """A tensor of torch's, images × channels × height × width."""
        channels, height, width = self.segment.shapes[name]
        image = 4 * channels * height * width
        step = image if images == 1 and self.images > 1 else 0
        return View(self.handed_in(name), 0, 4 * width, 4 * height * width, step, image * self.images)

    def pixel_bytes(self, name: str, layout: Layout, every: int) -> np.ndarray:
        """Where every number of a plane lies in torch's tensor, in bytes from the channel's start; negative: nowhere."""
        channels, height, width = self.segment.shapes[name]
        small = layout.height * layout.width
        image, pixel = np.divmod(layout.pixels, small)
        y, x = np.divmod(pixel, layout.width)
        return np.where(layout.pixels < 0, -1, 4 * ((image * channels * height + y * every) * width + x * every))

    def ready(self, place: Place) -> None:
        """Make a place from the value's primary one, or from what was handed in."""
        if place.made:
            return
        layout, source = place.layout, self.primary(place.value, place.images)
        if place.value in self.segment.inputs:
            step = self.add_step(structs.COPY, [place], None, "pack")
            step.in_ = self.external(place.value, place.images)
            start = self.pixel_bytes(place.value, layout, place.every)
        else:
            assert source is not None and source is not place
            step = self.add_step(structs.COPY, [place, source], None, "copy")
            start = self.moved(source.layout, layout, place.every)
        self.copy(step, layout, layout.offsets(), start)

    def copy(self, step: Step, layout: Layout, to: np.ndarray, source: np.ndarray) -> None:
        """Fill in a copy: where every number of a plane goes and comes from."""
        moves = np.stack([np.broadcast_to(to, source.shape).ravel(), source.ravel()], axis=1).astype(np.int32)
        inside = source.ravel() >= 0
        fills = moves[~inside] if layout.fill is not None else moves[:0]  # else padding is read by nobody
        step.channels = layout.channels
        step.keep("moves", np.concatenate([moves[inside], fills]))
        step.move_count, step.fill_count = int(inside.sum()), len(fills)

    @staticmethod
    def moved(source: Layout, target: Layout, every: int) -> np.ndarray:
        """Where every number of the target's plane lies in the source's, in bytes from its start."""
        table = np.full(source.grid.images * source.height * source.width, -1, np.int64)
        inside = source.pixels >= 0
        table[source.pixels[inside]] = source.offsets()[inside]
        image, pixel = np.divmod(target.pixels, target.height * target.width)
        y, x = np.divmod(pixel, target.width)
        index = (image * source.height + y * every) * source.width + x * every
        return np.where(target.pixels < 0, -1, table[np.where(target.pixels < 0, 0, index)])

    def put_side_by_side(self) -> None:
        """At the end of what runs image by image: every value that is still needed goes to its lane."""
        finishes = []
        for (name, images), places in self.places.items():
            if self.cut == 0 or images != self.images or name in self.segment.inputs:
                continue
            source = self.primary(name, 1)
            if source is None or not source.made:
                continue
            for place in places:
                step = self.add_step(structs.COPY, [place, source], None, "side by side")
                place.born = 0
                grid = place.layout.grid._replace(images=1)
                alone = replace(place.layout, grid=grid, lanes=grid.rows * grid.columns)  # the lanes of one image
                first = place.layout.offsets()[:, :, : alone.lanes]
                self.copy(step, place.layout, first, self.moved(source.layout, alone, place.every))
                step.__dict__["lanes"] = alone.lanes
                if place.layout.fill is not None:
                    finishes.append(place)
        self.border = len(self.steps)
        for place in finishes:
            self.fill_halo(place)

    def fill_halo(self, place: Place) -> None:
        """A copy of nothing, which ends as every step does: with the halo."""
        self.add_step(structs.COPY, [place, place], None, "halo").channels = place.layout.channels

    def unpack(self, name: str, images: int) -> None:
        place = self.primary(name, images)
        assert place is not None
        step = self.add_step(structs.COPY, [place], None, "unpack")
        step.out = self.external(name, images)
        layout = place.layout.with_halo(place.layout.halo, None)
        to = self.pixel_bytes(name, layout, 1)
        start = np.where(to < 0, -1, layout.offsets())
        self.copy(step, layout, to, start)

    def emit(self, op: Op, use: Use, images: int) -> None:
        for place in use.inputs:
            self.ready(place)
        output = use.output.layout
        if isinstance(op, Concat):
            self.concat(op, use)
            return
        kinds = {
            Conv: structs.CONVOLUTION,
            Pool: structs.POOL_MAX,
            Mean: structs.MEAN,
            Softmax: structs.SOFTMAX,
            Pointwise: structs.ADD,
        }
        step = self.add_step(kinds[type(op)], [use.output, *use.inputs], op, "")
        step.channels = output.channels
        step.rows, step.columns = output.visible
        step.stride_row, step.stride_column = use.stride
        step.activation = ACTIVATIONS.index(op.activation.name)
        step.low, step.high, step.slope = op.activation.low, op.activation.high, op.activation.slope
        step.scale = 1.0
        if isinstance(op, Pool):
            self.pool(step, op, use)
        elif isinstance(op, Pointwise):
            step.kind = structs.ADD if op.kind == "add" else structs.MUL
            step.scale = op.scale
        elif isinstance(op, Mean):
            source = use.inputs[0].layout
            step.rows, step.columns = source.visible
            step.scale = 1 / (source.height * source.width)
            step.images, step.lanes = images, source.grid.rows * source.grid.columns
        elif isinstance(op, Softmax) and output.fill is not None:
            self.fill_halo(use.output)

    def concat(self, op: Concat, use: Use) -> None:
        channel = 0
        for place in use.inputs:
            step = self.add_step(structs.ADD, [use.output, place], op, "")
            step.channels = place.layout.channels
            step.rows, step.columns = use.output.layout.visible
            step.scale = 1.0
            step.__dict__["channel"] = channel
            channel += place.layout.channels

    def pool(self, step: Step, op: Pool, use: Use) -> None:
        step.window_rows, step.window_columns = op.window.kernel
        step.dilation_row, step.dilation_column = op.window.dilation
        if op.kind == "mean":
            step.kind = structs.POOL_MEAN
            counts = self.counts(op)
            layout = use.output.layout
            weights = np.zeros(layout.pixels.shape, np.float32)
            inside = layout.pixels >= 0
            weights[inside] = 1 / counts.ravel()[layout.pixels[inside] % counts.size]
            step.keep("weights", vectors(weights[: step.rows, : step.columns]))

    def counts(self, op: Pool) -> np.ndarray:
        """Pixels in each window, as torch counts them: padding at the edges counts, what lies beyond it does not."""
        axes = []
        for axis in (0, 1):
            size, n = self.segment.shapes[op.inputs[0]][1 + axis], self.segment.shapes[op.output][1 + axis]
            first = np.arange(n) * op.window.stride[axis] - op.window.padding[axis]
            last = np.minimum(first + op.window.kernel[axis], size + op.window.padding[axis])
            if not op.count_padding:
                first, last = np.maximum(first, 0), np.minimum(last, size)
            axes.append(last - first)
        return np.full((len(axes[0]), len(axes[1])), op.divisor) if op.divisor else np.outer(*axes)

    # ---- memory

    def allocate(self, uses: list[Use]) -> int:
        """Places that live at the same time get different memory; the lowest free address each."""
        for op, use in zip(self.segment.ops, uses):
            if isinstance(op, Conv) and len(use.inputs) > 1:
                added, output = use.inputs[1], use.output
                alone = added is not use.inputs[0] and added.home.dies == output.born
                same = (added.layout.row, added.layout.channel, added.layout.start) == (
                    output.layout.row, output.layout.channel, output.layout.start
                )  # fmt: skip
                if alone and same and added.layout.fill is None:
                    output.shares = added
                    added.home.dies = max(added.home.dies, output.dies)
        for first, step in enumerate(self.steps):
            for place in {p.home for touched in self.touched[first : first + step.chained + 1] for p in touched}:
                place.born, place.dies = min(place.born, first), max(place.dies, first + step.chained)
        places = [p for places in self.places.values() for p in places if p.made and p.shares is None]
        places.sort(key=lambda p: p.born)
        placed: list[Place] = []
        top = 0
        for place in places:
            taken = sorted(
                (p.offset, p.offset + p.layout.size) for p in placed if p.born <= place.dies and place.born <= p.dies
            )
            offset = 0
            for start, end in taken:
                if offset + place.layout.size <= start:
                    break
                offset = max(offset, -(-end // PAGE) * PAGE)
            place.offset = offset
            placed.append(place)
            top = max(top, offset + place.layout.size)
        if top >= 2**31:
            raise MemoryError("a group of images needs more than 2 GB of memory")
        return top

    def view(self, place: Place) -> View:
        layout = place.layout
        return View(ARENA, place.home.offset + layout.start, layout.row, layout.channel, 0, 0)

    def resolve(self) -> None:
        """Fill in what depends on the final layouts and addresses."""
        for step, places, (op, label) in zip(self.steps, self.touched, self.labels):
            output, inputs = places[0], places[1:]
            if label == "unpack":
                step.in_ = self.view(output)
                continue
            step.out = self.view(output)
            step.out.start += step.__dict__.get("channel", 0) * output.layout.channel
            step.out.pass_ = 4 * step.__dict__.get("lanes", 0)
            if inputs:
                step.in_ = self.view(inputs[0])
            if len(inputs) > 1:
                step.add = self.view(inputs[1])
            if isinstance(op, Pool):  # a convolution's padding is in its taps
                step.in_.start -= op.window.padding[0] * step.in_.row + op.window.padding[1] * inputs[0].layout.vector
            if step.kind == structs.MEAN:
                pixels = inputs[0].layout.pixels[: step.rows, : step.columns]
                step.keep("weights", vectors(-(pixels >= 0).astype(np.int32)))
            if (fill := output.layout.fill) is not None:
                edges, masks = output.layout.edges
                seen = label != "side by side" and step.kind != structs.SOFTMAX
                step.finish_with(edges if seen else edges[:0], vectors(masks), fill)

    # ---- tiles

    def tune(self) -> None:
        _memory, arena = structs.arena(self.size)
        ctypes.memset(arena, 0x3C, self.size)  # as floats about 0.01: arithmetic on ordinary numbers
        for i, (step, places, (op, _)) in enumerate(zip(self.steps, self.touched, self.labels)):
            if isinstance(op, Conv):
                source, output = places[1].layout, places[0].layout
                added = places[2].layout if len(places) > 2 else None
                layer = Layer(step, op, source, output, added, self.library, self.strips.get(i), op.output in self.framed)
                self.tilings[op.output] = self.tuner.choose(layer, arena)

    def chains(self) -> dict[int, int]:
        """Convolutions of one pixel that follow each other on large values, and the height of their strips."""
        strips: dict[int, int] = {}
        first, heights = 0, 0

        def close(end: int) -> None:
            if end - first > 1 and heights:
                self.steps[first].chained = end - first - 1
                strips.update(dict.fromkeys(range(first, end), heights))

        form = None
        for i, ((op, _), places) in enumerate(zip(self.labels, self.touched)):
            layout = places[0].layout
            stride = self.steps[i].stride_row, self.steps[i].stride_column
            single = isinstance(op, Conv) and op.window.kernel == stride == (1, 1)
            now = (layout.grid, *layout.visible) if single else None
            if self.cut and i == self.border:
                form = None
            if now is None or now != form:
                close(i)
                first, heights, form = i, 0, now
            if now is not None:
                for place in places:
                    row = place.layout.channels * layout.visible[1] * layout.vector
                    if row * layout.visible[0] > CHAINED and row <= STRIP:
                        heights = min(heights or layout.visible[0], STRIP // row)
        close(len(self.steps))
        return strips

    def freeze(self) -> Any:
        """The steps as C wants them: arrays of structs, in sections."""
        border = self.border if self.cut else 0
        parts = [(self.steps[:border], self.images), (self.steps[border:], 1)]
        self.arrays = [(Step * max(1, len(steps)))(*steps) for steps, _ in parts]
        sections = [Section(structs.address(a), len(s), n) for a, (s, n) in zip(self.arrays, parts) if s]
        return (Section * len(sections))(*sections)


def vectors(array: np.ndarray) -> np.ndarray:
    """A copy that begins at an address fit for vectors."""
    array = np.ascontiguousarray(array)
    memory, address = structs.aligned(array.nbytes)
    start = address - memory.ctypes.data
    result = memory[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    result[...] = array
    return result
