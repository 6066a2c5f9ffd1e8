"""The copies of each value, which each have a layout of their own, and where they lie in the arena."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Protocol

from optg.deploy.engine.build import Library
from optg.deploy.engine.layout import NO_HALO, Grid, Halo, Layout, best_grid
from optg.deploy.engine.structs import ARENA, View

if TYPE_CHECKING:
    from optg.deploy.engine.step import Step

Shape = tuple[int, int, int]  # channels, height, width
PAGE = 4096
LARGEST_ARENA = 2**31  # offsets of taps and copies are int32


class Form(NamedTuple):
    """How images are cut into lanes: the grid of blocks, and the rows and columns of a block."""

    grid: Grid
    rows: int
    columns: int


class Operand(Protocol):
    """What a step reads or writes: a place in the arena, a part of one, or a tensor of the caller's."""

    @property
    def place(self) -> "Place | None": ...

    @property
    def per_image(self) -> int: ...

    def view(self) -> View: ...


@dataclass(eq=False)
class Place:
    """One copy of a value in the arena: its layout, the steps between which it is needed, and its address."""

    value: str
    layout: Layout
    images: int
    every: int = 1  # holds only every n-th row and column of the value
    born: int = -1  # the first step that touches it; -1: none does
    dies: int = -1  # the last step that touches it
    offset: int = 0
    overwrites: "Place | None" = None  # shares the memory of another place
    per_image: int = field(default=0, init=False)

    @property
    def place(self) -> "Place":
        return self

    @property
    def owner(self) -> "Place":
        """The place whose memory this one uses."""
        return self if self.overwrites is None else self.overwrites.owner

    @property
    def form(self) -> Form:
        return Form(self.layout.grid, self.layout.rows, self.layout.columns)

    def view(self) -> View:
        return View(ARENA, self.owner.offset + self.layout.start, self.layout.row, self.layout.channel, 0, 0)


@dataclass
class Part:
    """A part of a place: it starts `offset` bytes later, and `per_image` bytes later for each image of a group."""

    place: Place
    offset: int = 0
    per_image: int = 0

    def view(self) -> View:
        view = self.place.view()
        view.start += self.offset
        view.pass_ = self.per_image
        return view


@dataclass
class CallerTensor:
    """A torch tensor: images × channels × height × width."""

    buffer: int
    shape: Shape
    images: int  # in a group
    one_by_one: bool  # do the images of a group run one by one?
    place: None = field(default=None, init=False)
    per_image: int = field(default=0, init=False)

    def view(self) -> View:
        channels, height, width = self.shape
        image = 4 * channels * height * width
        return View(self.buffer, 0, 4 * width, 4 * height * width, image if self.one_by_one else 0, image * self.images)


class Places:
    """The places of a program's values, by the value's name and the number of images that they hold."""

    def __init__(self, shapes: dict[str, Shape], library: Library) -> None:
        self.shapes, self.library = shapes, library
        self.known: dict[tuple[str, int], list[Place]] = {}

    def __iter__(self) -> Iterator[Place]:
        return (place for places in self.known.values() for place in places)

    def of(self, name: str, images: int) -> list[Place]:
        return self.known.get((name, images), [])

    def best_form(self, name: str, images: int) -> Form:
        _, height, width = self.shapes[name]
        grid = best_grid(height, width, images, self.library.lanes)
        return Form(grid, -(-height // grid.rows), -(-width // grid.columns))

    def form(self, name: str, images: int) -> Form:
        """Return the form that a value has, or the best one if it has none. Places that skip pixels do not count."""
        whole = (place.form for place in self.of(name, images) if place.every == 1)
        return next(whole, None) or self.best_form(name, images)

    def want(
        self, name: str, images: int, form: Form, halo: Halo = NO_HALO, fill: float | None = None, every: int = 1
    ) -> Place:
        """Return a place of this value with this form and at least this halo: an existing one if possible, else a new one."""
        known = self.known.setdefault((name, images), [])
        for place in known:
            layout = place.layout
            if (place.form, place.every) == (form, every) and (None in (fill, layout.fill) or layout.fill == fill):
                place.layout = layout.with_halo(layout.halo.union(halo), layout.fill if fill is None else fill)
                return place
        channels, height, width = self.shapes[name]
        height, width = -(-height // every), -(-width // every)
        known.append(Place(name, Layout(channels, height, width, *form, self.library.lanes, halo, fill), images, every))
        return known[-1]


def allocate(places: Places, steps: Sequence["Step"]) -> int:
    """Give every place the lowest address that is free while it is needed. Return the size of the arena in bytes."""
    set_lifetimes(steps)
    placed: list[Place] = []
    for place in sorted((p for p in places if p.born >= 0 and p.overwrites is None), key=lambda p: p.born):
        neighbours = [p for p in placed if p.born <= place.dies and place.born <= p.dies]
        for other in sorted(neighbours, key=lambda p: (p.offset, p.layout.size)):
            if place.offset + place.layout.size <= other.offset:
                break
            place.offset = max(place.offset, -(-(other.offset + other.layout.size) // PAGE) * PAGE)
        placed.append(place)
    size = max(place.offset + place.layout.size for place in placed)
    if size >= LARGEST_ARENA:
        raise MemoryError("a group of images needs more than 2 GB of memory")
    return size


def set_lifetimes(steps: Sequence["Step"]) -> None:
    """Find the first and last step that needs each place, and the outputs that may overwrite an input."""
    for i, step in enumerate(steps):
        for operand in (step.output, *step.inputs):
            if (place := operand.place) is not None:
                if place.born < 0:  # a place that is filled image by image has to survive all passes
                    place.born = 0 if operand.per_image else i
                place.dies = i
    for step in steps:
        if step.reusable is not None and step.output.place is not None:
            overwrite(step.reusable, step.output.place)
    for first, step in enumerate(steps):
        last = first + step.chained
        for place in {place.owner for other in steps[first : last + 1] for place in other.places}:
            place.born, place.dies = min(place.born, first), max(place.dies, last)


def overwrite(source: Place, output: Place) -> None:
    """Let `output` use the memory of `source`, if that has the same layout and is not needed any more."""
    same = all(getattr(source.layout, name) == getattr(output.layout, name) for name in ("row", "channel", "start"))
    if same and source.layout.fill is None and source.owner.dies == output.born:
        output.overwrites = source
        source.owner.dies = max(source.owner.dies, output.dies)
