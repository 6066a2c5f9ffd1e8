"""Convolutions and linear layers on bytes."""

from collections.abc import Callable
from ctypes import Structure, c_float, c_int64, c_uint8, c_void_p
from dataclasses import dataclass, field
from functools import cached_property
from typing import ClassVar, NamedTuple

import numpy as np

from optg.deploy.engine.build import Int8Kernel, Library
from optg.deploy.engine.int8.base import LARGEST_SUM, Call, Int8Op, Places, Quantization
from optg.deploy.engine.int8.blocks import DENSE, SIZES, block_size, groups_of_blocks, in_blocks, interleave_call
from optg.deploy.engine.int8.copy import split_call
from optg.deploy.engine.int8.pixel_convolution import lay_out_pixels, prefers_pixels
from optg.deploy.engine.int8.planes import Planes
from optg.deploy.engine.int8.rescaling import Rescaling, exact_scales, rescaling
from optg.deploy.engine.int8.taps import Taps, make_taps
from optg.deploy.engine.memory import Shape
from optg.deploy.engine.ops.base import Unsupported
from optg.deploy.engine.ops.window import Window
from optg.deploy.engine.tune import Tuner

FIRST_CACHE = 32 << 10  # bytes of a tile's input that stay in the first cache
WORTH_PARTS = 64  # weights of a filter above which input channels may be taken in parts
PARTS_TILE = 4  # vectors of the largest tile whose sums are kept between parts


class ConvolutionStruct(Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("bundles", "cost", "start", "scale", "offset", "mask", "bases")),
        *((name, c_int64) for name in ("bundle_count", "wide_count", "parts", "scratch")),
        *((name, c_int64) for name in ("positions", "plane", "lead", "wide_tile", "tile")),
        *((name, c_int64) for name in ("block", "offset_unit", "narrow", "clamps", "real")),
        *((name, c_float) for name in ("residual", "real_low", "real_high")),
        *((name, c_uint8) for name in ("low", "high", "fill")),
    ]


@dataclass
class Convolution(Int8Op):
    """A convolution of inputs[0], plus inputs[1] if there are two."""

    weight: np.ndarray  # outputs × inputs / groups × kernel, int8
    weight_scale: np.ndarray  # one per output channel
    bias: np.ndarray  # reals
    window: Window
    groups: int = 1
    name: str = ""  # of the weight, in the model
    nonzero: int = field(init=False)

    can_be_real: ClassVar[bool] = True

    def __post_init__(self) -> None:
        self.nonzero = int(np.count_nonzero(self.weight))
        if self.weight.min(initial=0) < -127:
            raise Unsupported("a weight is -128; expected -127 to 127")
        if not (np.isfinite(self.weight_scale) & (self.weight_scale > 0)).all():
            raise Unsupported("a scale of its weights is not a positive number")
        if not np.isfinite(self.bias).all():
            raise Unsupported("its bias is not finite")

    @property
    def can_add(self) -> bool:
        return len(self.inputs) == 1

    @cached_property
    def groups_by_block(self) -> dict[int, int]:
        """The number of groups of four weights, by the size of blocks. No block reaches into the next group of channels."""
        sizes = [size for size in SIZES if self.groups == 1 or self.weight.shape[1] % size == 0]
        return {size: groups_of_blocks(self.weight, size) for size in sizes}

    @cached_property
    def weight_sums(self) -> tuple[np.ndarray, np.ndarray]:
        """The sums of each filter's negative weights, and of its positive ones."""
        rows = self.weight.reshape(len(self.weight), -1)
        return np.minimum(rows, 0).sum(axis=1, dtype=np.int64), np.maximum(rows, 0).sum(axis=1, dtype=np.int64)

    @cached_property
    def rescaling(self) -> Rescaling:
        """How sums become results. Only valid once the operation is closed."""
        return rescaling(self)

    def close(self, output: str, result: Quantization | None) -> None:
        """Exclude overflow, whatever the inputs are."""
        super().close(output, result)
        negative, positive = self.weight_sums
        largest = 255 * (positive - negative) + np.abs(self.quantized[0].zero_point * (positive + negative))
        if largest.max(initial=0) > LARGEST_SUM:
            raise Unsupported("a sum of its products may exceed 32 bits")
        scale, residual, offset = exact_scales(self)
        reals = largest * scale + np.abs(offset) + 255 * residual
        if self.result is not None and not reals.max(initial=0) < LARGEST_SUM // 2:
            raise Unsupported("a rescaled sum may exceed 32 bits")

    # ---- planning

    def prefers_pixels(self, places: Places) -> bool:
        return prefers_pixels(self, places)

    def lay_out(self, places: Places) -> Callable[[], list[Call]]:
        if self.output in places.on_pixels:
            return lay_out_pixels(self, places)
        source = places.value(self.inputs[0], self.quantized[0].zero_point)
        output = places.value(self.output, self.out.zero_point, 1 if self.result else 4)
        calls: list[Call] = []
        phases, kind = self.phases(), "all"
        if self.window.stride != (1, 1):
            channels, height, width = source.shape
            shape = (channels * len(phases), -(-height // self.window.stride[0]), -(-width // self.window.stride[1]))
            kind = f"every {self.window.stride} from {phases}"
            whole, (source, new) = source, places.copy(self.inputs[0], kind, shape, source.zero_point)
            if new:
                calls.append(split_call(whole, source, self.window.stride, phases, places.library))
        self.reserve(source, output)
        if (block := block_size(self, places)) > 1:
            shape = (-(-source.shape[0] // len(phases) // block) * len(phases), *source.shape[1:])
            planes = source
            source, new = places.copy(self.inputs[0], f"{kind}, {block} channels", shape, planes.zero_point, block)
            source.geometry.join(planes.geometry)
            self.reserve(source, output)
            if new:
                calls.append(interleave_call(planes, source, len(phases)))
        added = [places.value(name, q.zero_point) for name, q in zip(self.inputs[1:], self.quantized[1:])]
        for value in (output, *added):
            source.geometry.join(value.geometry)
        return lambda: [*calls, self.call(source, output, added, phases, places.library)]

    def shifts(self, axis: int) -> np.ndarray:
        """Return how far each row (or column) of the kernel lies from the output position, in pixels of the input."""
        return np.arange(self.window.kernel[axis]) * self.window.dilation[axis] - self.window.padding[axis]

    def phases(self) -> list[tuple[int, int]]:
        """Return the rows and columns, modulo the stride, that the kernel reads."""
        rows, columns = (sorted(set(map(int, self.shifts(axis) % self.window.stride[axis]))) for axis in (0, 1))
        return [(row, column) for row in rows for column in columns]

    def reserve(self, source: Planes, output: Planes) -> None:
        """Make sure that rows and images are far enough apart for padding, and that it is filled if it is read."""
        sizes, pads = [], []
        for axis in (0, 1):
            steps = self.shifts(axis) // self.window.stride[axis]
            before, last = max(0, -int(steps.min())), output.shape[1 + axis] - 1 + int(steps.max())
            sizes.append(max(source.shape[1 + axis] + before, last + 1, output.shape[1 + axis]))
            pads.append((before, last >= source.shape[1 + axis]))
        source.geometry.need(sizes[1], sizes[0])
        partial = self.phases() != [(0, 0)]  # the last row or column of another phase may be missing
        if partial or any(before or after for before, after in pads):
            source.pad(pads[0][0], pads[1][0])

    def offsets(self, source: Planes, phases: list[tuple[int, int]]) -> np.ndarray:
        """Return the bytes from the output position to each tap of a filter: input channels, or blocks of them, × kernel."""
        (row_phase, row), (column_phase, column) = (
            (self.shifts(axis) % self.window.stride[axis], self.shifts(axis) // self.window.stride[axis]) for axis in (0, 1)
        )
        phase = np.array([[phases.index((int(r), int(c))) for c in column_phase] for r in row_phase])
        inside = phase * source.plane + row[:, None] * source.columns + column[None, :]
        channels = np.arange(source.shape[0] // len(phases))[:, None, None] * (len(phases) * source.plane)
        return source.number * (channels + inside)

    def call(
        self, source: Planes, output: Planes, added: list[Planes], phases: list[tuple[int, int]], library: Library
    ) -> "ConvolutionCall":
        offsets = self.offsets(source, phases)
        first = int(offsets.min())
        per_group = (offsets - first).reshape(self.groups, -1)
        rows = np.repeat(per_group, len(self.weight) // self.groups, axis=0) if self.groups > 1 else per_group
        return ConvolutionCall(
            "int8_convolution", output, [source, *added], output.shape[0],
            make_struct=lambda: self.struct(output, library.shift),
            op=self,
            in_place=added[0] if added and added[0] is not source and self.result else None,
            written=output,
            first=first,
            offsets=rows,
            block=source.number,
            scratch=self.scratch(source, library),
            kernels=library.int8_kernels,
        )  # fmt: skip

    def scratch(self, source: Planes, library: Library) -> Planes | None:
        """Return memory for the sums between parts, if a tile may read more than the first cache holds."""
        if self.groups > 1 or self.weight.shape[1] * PARTS_TILE * library.span <= FIRST_CACHE:
            return None
        return Planes((len(self.weight), 1, 1), PARTS_TILE * library.span, number=4)

    def struct(self, output: Planes, shift: int) -> tuple[Structure, list[np.ndarray]]:
        low, high = self.bounds if self.result else (0, 255)
        how = self.rescaling
        start = how.start + shift * sum(self.weight_sums)  # some kernels subtract the shift from each input
        arrays = [start.astype(np.int32), how.scale, how.offset]
        own = ConvolutionStruct(
            positions=output.positions, plane=output.plane, lead=output.lead, real=self.result is None,
            narrow=how.narrow, clamps=(low, high) != (0, 255),
            residual=how.residual, real_low=self.low, real_high=self.high, low=low, high=high, fill=output.zero_point,
        )  # fmt: skip
        own.start, own.scale, own.offset = (array.ctypes.data for array in arrays)
        if output.fills:
            arrays.append(output.pixels())
            own.mask = arrays[-1].ctypes.data
        return own, arrays

    def describe(self, shape: Shape, choice: tuple[int, ...] | None) -> list[str]:
        kind = "dense" if choice is not None and choice[0] > 1 else "sparse"
        kernel = "×".join(map(str, self.window.kernel))
        how = [f"int8 {kind} {kernel}", "add" * (len(self.inputs) > 1), self.clamp_label]
        density = f"{self.nonzero / max(1, self.weight.size):.1%}"
        tile = "×".join(map(str, choice)) if choice else ""
        return [self.name, " + ".join(filter(None, how)), "×".join(map(str, shape)), density, tile]


class Tiling(NamedTuple):
    """Filters that share their taps, and vectors of a tile: for these filters, and for those left over."""

    width: int
    wide_tile: int
    tile: int
    parts: int  # of the input channels


@dataclass(eq=False, kw_only=True)
class ConvolutionCall(Call):
    op: Convolution
    written: Planes
    first: int  # bytes from the output position to the first tap
    offsets: np.ndarray  # bytes from there to every tap of a filter; one row for all filters, or one for each
    block: int  # input channels that lie interleaved
    scratch: Planes | None  # for sums between parts
    kernels: list[Int8Kernel]
    made: dict[tuple[int, int], Taps] = field(default_factory=dict)

    def bind(self, library: Library) -> None:
        super().bind(library)
        self.c.in_.start += self.first
        self.own.scratch = self.scratch.address if self.scratch is not None else 0
        self.own_span, self.own.block = library.span, self.block
        self.step = self.c

    @property
    def values(self) -> list[Planes]:
        return [*super().values, *([self.scratch] if self.scratch is not None else [])]

    def tune(self, tuner: Tuner, arena: int) -> None:
        self.vectors = -(-self.own.positions // tuner.library.span)
        self.choice = tuner.choose(self, arena)
        taps = self.taps(self.choice)
        self.arrays += [*taps.arrays, taps.bundles, taps.cost, taps.bases]
        self.made = {}

    # ---- what the tuner asks

    @property
    def signature(self) -> str:
        op, output = self.op, self.written
        nonzero = round(4 * np.log2(1 + op.nonzero))
        shape = (
            *op.weight.shape,
            op.groups,
            *op.window,
            output.shape,
            self.own.positions,
            self.block,
            output.fills,
            len(op.inputs),
            nonzero,
        )
        return "int8 " + " ".join(map(str, shape)).replace(" ", "")

    def tilings(self) -> list[Tiling]:
        """Return all tilings that make sense: widths by the expected number of instructions, tiles up to the plane."""
        density = self.op.nonzero / max(1, self.op.weight.size)
        singles = self.tiles(1)
        found = [Tiling(1, 1, tile, parts) for tile in singles for parts in self.parts(tile)]
        if density > DENSE and self.op.groups == 1 and self.block == 1:
            widths = {kernel.width for kernel in self.kernels if 1 < kernel.width <= len(self.op.weight)}
            found += [Tiling(width, tile, max(singles), 1) for width in widths for tile in self.tiles(width)]
        return found

    def tiles(self, width: int) -> list[int]:
        sizes = sorted({k.vectors for k in self.kernels if k.width == width})
        by_count = {-(-self.vectors // size): size for size in reversed(sizes)}  # the smallest size of each number of tiles
        return sorted(by_count.values())

    def parts(self, tile: int) -> list[int]:
        """Return into how many parts the input channels may be cut: so many that a part's rows fit the first cache."""
        rows = self.own_span * tile * self.op.weight.shape[1]
        many = self.op.nonzero > WORTH_PARTS * len(self.op.weight) and self.scratch is not None and tile <= PARTS_TILE
        needed = min(4, -(-rows // FIRST_CACHE))
        return [1, needed] if many and needed > 1 else [1]

    def shortlist(self) -> list[Tiling]:
        return self.tilings()

    def variants(self, tiling: Tiling) -> list[Tiling]:
        return [tiling]

    def recall(self, known: list[int] | None) -> Tiling | None:
        tiling = Tiling(*known) if known and len(known) == 4 else None
        return tiling if tiling in self.tilings() else None

    def taps(self, tiling: Tiling) -> Taps:
        key = tiling.width, tiling.parts
        if key not in self.made:
            self.made[key] = make_taps(in_blocks(self.op.weight, self.block), self.offsets, *key)
        return self.made[key]

    @property
    def tap_bytes(self) -> int:
        return self.current.bytes

    def fill(self, tiling: Tiling) -> None:
        """Write a tiling into the C struct."""
        taps = self.current = self.taps(tiling)
        own = self.own
        own.bundles, own.cost, own.bases = (array.ctypes.data for array in (taps.bundles, taps.cost, taps.bases))
        own.parts, own.bundle_count = taps.bundles.shape
        own.wide_count = taps.wide_count
        own.wide_tile, own.tile = tiling.wide_tile, tiling.tile
        own.offset_unit = taps.offset_unit
