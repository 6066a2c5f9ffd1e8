"""How a value of bytes lies in memory: flat planes.

A plane is one channel: the rows of an image one after the other, `columns` bytes apart, so that padding separates them; after
`rows` rows the next image of a group follows. The padding to the right of a row is also the padding to the left of the next
one, and the padding below an image is also that above the next image or plane. A tap of a convolution is then a shift of the
whole plane by a constant, if input and output have the same `columns` and `rows`: they share a `Geometry`.
"""

from collections.abc import Iterable
from ctypes import Structure, c_int64
from dataclasses import dataclass, field

import numpy as np

from optg.deploy.engine.memory import LARGEST_ARENA, PAGE, Shape
from optg.deploy.engine.structs import ARENA, View

LINE = 64
SLACK = 4 * LINE  # kernels read whole vectors, so up to this far beyond the last plane
CONFLICT = 4096  # planes that are a multiple of this many bytes apart compete for the same cache sets


class Geometry:
    """The distance between rows and between images, which values share that one kernel reads and writes."""

    def __init__(self, columns: int, rows: int) -> None:
        self.columns, self.rows = columns, rows
        self.joined: Geometry | None = None

    @property
    def root(self) -> "Geometry":
        return self if self.joined is None else self.joined.root

    def need(self, columns: int, rows: int) -> None:
        """Leave at least this much room for a row and for an image."""
        root = self.root
        root.columns, root.rows = max(root.columns, columns), max(root.rows, rows)

    def join(self, other: "Geometry") -> None:
        """Share one geometry from now on."""
        ours, theirs = self.root, other.root
        if ours is not theirs:
            theirs.need(ours.columns, ours.rows)
            ours.joined = theirs


class PlanesStruct(Structure):
    _fields_ = [(name, c_int64) for name in ("columns", "rows", "height", "width", "images", "plane", "lead", "fill")]


@dataclass(eq=False)
class Planes:
    """One copy of a value in the arena."""

    shape: Shape
    images: int
    zero_point: int = 0
    number: int = 1  # bytes of a position: 1, or 4 for floats; more where channels are interleaved
    fills: bool = False  # does something read the padding?
    margin: tuple[int, int] = (0, 0)  # rows and columns that are read before the first plane
    born: int = -1  # the first and the last step that touch it
    dies: int = -1
    offset: int = 0
    overwrites: "Planes | None" = None  # shares the memory of another value
    geometry: Geometry = field(init=False)

    def __post_init__(self) -> None:
        self.geometry = Geometry(self.shape[2], self.shape[1])

    @property
    def planes(self) -> "Planes":
        return self

    @property
    def columns(self) -> int:
        return self.geometry.root.columns

    @property
    def rows(self) -> int:
        return self.geometry.root.rows

    def pad(self, top: int, left: int) -> None:
        """Fill the padding with the zero point: something reads this many rows above and columns before the image."""
        self.fills = True
        self.margin = max(self.margin[0], top), max(self.margin[1], left)

    @property
    def positions(self) -> int:
        """Bytes up to the last pixel."""
        return ((self.images - 1) * self.rows + self.shape[1] - 1) * self.columns + self.shape[2]

    @property
    def plane(self) -> int:
        """Numbers from one plane to the next."""
        size = -(-self.images * self.rows * self.columns // LINE) * LINE
        return size + LINE if size % CONFLICT == 0 else size

    @property
    def lead(self) -> int:
        """Bytes of padding before the first plane."""
        return self.number * -(-(self.margin[0] * self.columns + self.margin[1]) // LINE) * LINE

    @property
    def size(self) -> int:
        after = self.rows * self.columns  # taps may lie below the last row
        return self.lead + self.number * (self.shape[0] * self.plane + after) + SLACK

    def pixels(self) -> np.ndarray:
        """Return 255 for each byte of a plane that holds a pixel, and 0 for padding."""
        mask = np.zeros((self.images, self.rows, self.columns), np.uint8)
        mask[:, : self.shape[1], : self.shape[2]] = 255
        return np.pad(mask.ravel(), (0, self.plane - mask.size))

    def view(self) -> View:
        return View(ARENA, self.address, self.columns, self.number * self.plane, 0, 0)

    @property
    def address(self) -> int:
        return self.owner.offset + self.lead

    @property
    def owner(self) -> "Planes":
        return self if self.overwrites is None else self.overwrites.owner

    def struct(self) -> PlanesStruct:
        fill = self.zero_point if self.fills else -1
        _, height, width = self.shape
        return PlanesStruct(self.columns, self.rows, height, width, self.images, self.plane, self.lead, fill)

    def overwrite(self, other: "Planes") -> None:
        """Use the memory of a value that nothing needs after the step that makes this one."""
        same = (self.plane, self.number, self.lead, self.shape[0]) == (other.plane, other.number, other.lead, other.shape[0])
        if same and other.owner.dies == self.born:
            self.overwrites = other
            other.owner.dies = max(other.owner.dies, self.dies)


@dataclass(eq=False)
class Part:
    """The planes of a value from one channel on."""

    planes: Planes
    channel: int = 0

    def view(self) -> View:
        view = self.planes.view()
        view.start += self.channel * view.channel
        return view


def allocate(values: Iterable[Planes]) -> int:
    """Give every value the lowest address that is free while it is needed. Return the size of the arena in bytes."""
    placed: list[Planes] = []
    for value in sorted((v for v in values if v.overwrites is None), key=lambda v: v.born):
        neighbours = [v for v in placed if v.born <= value.dies and value.born <= v.dies]
        for other in sorted(neighbours, key=lambda v: v.offset):
            if value.offset + value.size <= other.offset:
                break
            value.offset = max(value.offset, -(-(other.offset + other.size) // PAGE) * PAGE)
        placed.append(value)
    size = max(value.offset + value.size for value in placed)
    if size >= LARGEST_ARENA:
        raise MemoryError("a group of images needs more than 2 GB of memory")
    return size
