"""A segment of a network and a number of images -> a program: places, steps, memory, tiles.

One thread carries a *group* through the network: one image, cut into as many blocks as a vector has lanes, or as many images
as there are lanes. In a group of images the first operations may run image by image, where one image fits into the caches;
at the *cut* the images are put side by side, each into its own lane.
"""

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from optg.deploy.engine import structs
from optg.deploy.engine.build import Library
from optg.deploy.engine.memory import CallerTensor, Place, Places, Shape, allocate
from optg.deploy.engine.ops import copy
from optg.deploy.engine.ops.base import Op
from optg.deploy.engine.step import Step
from optg.deploy.engine.structs import FIRST_TENSOR, Section
from optg.deploy.engine.tune import Tuner, fastest
from optg.deploy.graph import one_line

if TYPE_CHECKING:
    from optg.deploy.engine.lower import Lowering
    from optg.deploy.engine.runner import Runner

SIDE_BY_SIDE = 8 << 20  # largest value, in bytes, that is put side by side
SHARED = 100_000  # multiply-adds per step, on average, below which threads would wait for each other longer than they work
CHAINED, STRIP = 2 << 20, 384 << 10  # bytes of a value that is computed in strips, and of a strip


class Misfit(Exception):
    """A value is not as planned, in its shape or its numbers: torch then runs the model."""


class OpSequence:
    """Operations that run one after the other in the engine, without torch in between. The base of segments."""

    ops: list[Any]
    shapes: dict[str, Shape]  # of the values: channels, height, width
    forms: dict[str, tuple[int, ...]]  # of the same values in torch, without the batch
    outputs: list[str]  # values that are used elsewhere

    @cached_property
    def inputs(self) -> list[str]:
        """The values that are computed elsewhere."""
        made = {op.output for op in self.ops}
        return list(dict.fromkeys(name for op in self.ops for name in op.inputs if name not in made))

    @property
    def new_tensors(self) -> list[str]:
        """The outputs that share no memory with inputs."""
        return self.outputs

    @property
    def c_files(self) -> set[Path]:
        """The C files of operations that are not in c/ops/."""
        return set()

    def take(self, op: Any, inputs: set[str]) -> bool:
        """Add an operation with these inputs, if it can run in this part. Return whether it can."""
        if op.part is not type(self):
            return False
        self.ops.append(op)
        return True

    def keep_outputs(self, used: set[str]) -> None:
        """Keep as outputs only the values that are used elsewhere."""
        self.outputs = [op.output for op in self.ops if op.output in used]

    def work(self) -> int:
        """Return the multiply-adds of one image."""
        return sum(op.nonzero * self.shapes[op.output][1] * self.shapes[op.output][2] for op in self.ops)

    def take_inputs(self, value: Callable[[str], Tensor], batch: int) -> dict[str, Tensor]:
        """Return the inputs, which `value` finds by name. Raise Misfit if a shape is not as planned."""
        given = {name: value(name).contiguous() for name in self.inputs}
        for name, tensor in given.items():
            if tensor.shape != (wanted := (batch, *self.forms[name])):
                found, expected = ("×".join(map(str, shape)) for shape in (tensor.shape, wanted))
                raise Misfit(f"{name} has the shape {found}; expected {expected}")
        return given


@dataclass
class Segment(OpSequence):
    """Operations on floats."""

    ops: list[Op]
    shapes: dict[str, Shape]  # of the values: channels, height, width
    forms: dict[str, tuple[int, ...]]  # of the same values in torch, without the batch
    outputs: list[str] = field(default_factory=list)  # values that are used elsewhere
    programs: "dict[int, Program]" = field(default_factory=dict)  # by the number of images in a group

    @classmethod
    def start(cls, op: Op, lowering: "Lowering") -> "Segment":
        """Return a part with one operation."""
        return cls([op], lowering.shapes, lowering.forms)

    @property
    def c_files(self) -> set[Path]:
        return {op.source for op in self.ops if op.source is not None}

    def run(self, value: Callable[[str], Tensor], batch: int, runner: "Runner") -> dict[str, Tensor]:
        """Compute the outputs. `value` returns the value of a name."""
        given = self.take_inputs(value, batch)
        for name, tensor in given.items():
            if not runner.library.c.engine_finite(tensor.data_ptr(), tensor.numel()):
                raise Misfit(f"{name} holds NaN or infinite numbers")  # torch does not skip their products with 0
        try:
            made = {name: torch.empty(batch, *self.forms[name]) for name in self.outputs}
        except RuntimeError as error:
            raise MemoryError(one_line(error)) from error
        tensors = [*given.values(), *made.values()]
        done = 0
        for images, groups in split(batch, runner.library.lanes):
            addresses = structs.pointers([(tensor[done:] if done else tensor).data_ptr() for tensor in tensors])
            runner.run(self.program(images, runner), addresses, len(tensors), groups)
            done += images * groups
        return made

    def program(self, images: int, runner: "Runner") -> "Program":
        """Return the program for a group of this many images; plan it at first use."""
        if images not in self.programs:
            tuner = runner.tuner
            known = tuner.known_cut(self, images)
            choices = cuts(self, images) if images > 1 else [0]
            if known is not None and images > 1 and 0 <= known <= len(self.ops):
                choices = [known]
            programs = [Program(self, images, cut, runner.library, tuner) for cut in choices]
            program = programs[0]
            if len(programs) > 1:
                program = fastest(programs, runner.time)
                tuner.remember_cut(self, images, program.cut)
            self.programs[images] = program
            tuner.save()
        return self.programs[images]

    def rows(self) -> list[list[str]]:
        """Return the rows of the operations in the table of a compiled model."""
        tiles = {step.op.output: step.choice for p in self.programs.values() for step in p.steps if step.op is not None}
        return [op.describe(self.shapes[op.output], tiles.get(op.output)) for op in self.ops]


Op.part = Segment


def split(batch: int, lanes: int) -> list[tuple[int, int]]:
    """Split a batch into groups: (images in a group, number of such groups). It does not depend on the number of threads."""
    whole, rest = divmod(batch, lanes)
    groups = [(lanes, whole)] if whole else []
    if rest and 2 * rest >= lanes > 2:
        return [*groups, (rest, 1)]
    return [*groups, (1, rest)] if rest else groups


def cuts(segment: Segment, images: int) -> list[int]:
    """Return the operations before which images may be put side by side: where the image size changes, or after the last one.

    The largest value has to fit into the last cache then. A pooling's output is smaller than its input, so the cut comes
    after it.
    """
    sizes = [segment.shapes[op.output] for op in segment.ops]
    found = {len(sizes)}
    for i in range(len(sizes) - 1, -1, -1):
        used = [segment.shapes[name] for name in segment.ops[i].inputs]
        if max(4 * images * c * h * w for c, h, w in [sizes[i], *used]) > SIDE_BY_SIDE:
            break
        if i == 0 or sizes[i][1:] != sizes[i - 1][1:]:
            found.add(i + segment.ops[i].cut_after)
    return sorted(found, reverse=True)


class Program:
    """The steps for one group of images. C repeats them for every group of a batch."""

    def __init__(self, segment: Segment, images: int, cut: int, library: Library, tuner: Tuner) -> None:
        self.segment, self.images = segment, images
        self.cut = 0 if images == 1 else cut
        places = Places(segment.shapes, library)
        self.steps, self.border = StepBuilder(segment, images, self.cut, places).build()
        chain(self.steps[: self.border])
        chain(self.steps[self.border :])
        self.size = allocate(places, self.steps)  # of the arena
        _memory, arena = structs.arena(self.size)
        ctypes.memset(arena, 0x3C, self.size)  # floats of about 0.01: arithmetic on ordinary numbers
        for step in self.steps:
            step.bind(library)
            step.tune(tuner, arena)
        self.sections = self.freeze()
        self.shared = images * segment.work() > SHARED * len(self.steps)  # should threads share the work of one group?

    def freeze(self) -> Any:
        """Return the steps as C arrays, in sections: those that run once per image, and those that run once per group."""
        parts = [(self.steps[: self.border], self.images), (self.steps[self.border :], 1)]
        self.arrays = [(structs.Step * max(1, len(steps)))(*(step.c for step in steps)) for steps, _ in parts]
        sections = [Section(structs.address(a), len(s), n) for a, (s, n) in zip(self.arrays, parts) if s]
        return (Section * len(sections))(*sections)


class StepBuilder:
    """Makes the steps of a segment, in order, and adds copies where a value is needed in another layout."""

    def __init__(self, segment: Segment, images: int, cut: int, places: Places) -> None:
        self.segment, self.images, self.cut, self.places = segment, images, cut, places
        self.steps: list[Step] = []
        self.filled: set[Place] = set()  # places that hold their value

    def build(self) -> tuple[list[Step], int]:
        """Return all steps, and how many of them run image by image."""
        at_once = [1 if i < self.cut else self.images for i in range(len(self.segment.ops))]
        placed = [op.lay_out(self.places, images) for op, images in zip(self.segment.ops, at_once)]
        border = 0
        for i, (op, images) in enumerate(zip(self.segment.ops, at_once)):
            if i == self.cut:
                border = self.put_side_by_side()
            for place in placed[i].inputs:
                self.fill(place)
            for step in placed[i].make_steps():
                self.add(step)
            if op.output in self.segment.outputs:
                self.add(copy.unpack(self.tensor(op.output, images), self.places.of(op.output, images)[0]))
        return self.steps, len(self.steps) if self.cut == len(self.segment.ops) else border

    def add(self, step: Step) -> None:
        self.steps.append(step)
        self.filled.update(step.places)

    def tensor(self, name: str, images: int) -> CallerTensor:
        number = [*self.segment.inputs, *self.segment.outputs].index(name)
        one_by_one = images == 1 and self.images > 1
        return CallerTensor(FIRST_TENSOR + number, self.segment.shapes[name], self.images, one_by_one)

    def fill(self, place: Place) -> None:
        """Copy a value to a place, unless it is there."""
        if place in self.filled:
            return
        if place.value in self.segment.inputs:
            self.add(copy.pack(place, self.tensor(place.value, place.images)))
        else:
            self.add(copy.convert(place, self.places.of(place.value, place.images)[0]))

    def put_side_by_side(self) -> int:
        """Copy every value of a single image that is still needed to its lanes in the group. Return the border."""
        gathered = []
        for place in self.places:
            sources = [source for source in self.places.of(place.value, 1)[:1] if source in self.filled]
            if sources and place.images == self.images and place.value not in self.segment.inputs:
                self.add(copy.put_side_by_side(place, sources[0]))
                gathered.append(place)
        border = len(self.steps)
        for place in gathered:
            if place.layout.fill is not None:
                self.add(copy.fill_halo(place))
        return border


def chain(steps: Sequence[Step]) -> None:
    """Let consecutive steps on large values run strip by strip, if they have the same chain key."""
    for key, group in groupby(steps, key=lambda step: step.chain_key):
        members = list(group)
        if key is None or len(members) < 2:
            continue
        rows, columns = members[0].over.visible
        heights = []
        for place in (place for step in members for place in step.places):
            row = place.layout.channels * columns * place.layout.vector
            if row * rows > CHAINED and row <= STRIP:
                heights.append(STRIP // row)
        if heights:
            members[0].chained = len(members) - 1
            for step in members:
                step.strip = min(rows, *heights)
