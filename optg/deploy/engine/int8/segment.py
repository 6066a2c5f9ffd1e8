"""Operations on bytes and a number of images -> a program: places, calls, memory, tiles."""

import ctypes
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from optg.deploy.engine import structs
from optg.deploy.engine.build import Library
from optg.deploy.engine.int8.base import Call, CallerTensor, Int8Op, Places, Quantization
from optg.deploy.engine.int8.copy import pack_call, unpack_call
from optg.deploy.engine.int8.planes import LINE, Planes, allocate
from optg.deploy.engine.memory import Shape
from optg.deploy.engine.plan import SHARED, OpSequence
from optg.deploy.engine.structs import FIRST_TENSOR, Section
from optg.deploy.engine.tune import Tuner

if TYPE_CHECKING:
    from optg.deploy.engine.lower import Lowering
    from optg.deploy.engine.runner import Runner

GROUPS = (1, 2, 4, 8, 16, 32)  # images that lie in one plane
LARGEST_VALUE = 2 << 20  # bytes of a value that several images may take: more does not fit a cache
WORTH = 0.9  # more images in a plane have to reduce the work to this


@dataclass
class Int8Segment(OpSequence):
    """Operations on bytes."""

    ops: list[Int8Op]
    shapes: dict[str, Shape]  # of the values: channels, height, width
    forms: dict[str, tuple[int, ...]]  # of the same values in torch, without the batch
    known: dict[str, Quantization]  # of the values that are bytes
    outputs: list[str] = field(default_factory=list)  # values that are used elsewhere
    programs: "dict[int, Int8Program]" = field(default_factory=dict)  # by the number of images in a group

    @classmethod
    def start(cls, op: Int8Op, lowering: "Lowering") -> "Int8Segment":
        """Return a part with one operation."""
        return cls([op], lowering.int8.shapes, lowering.forms, lowering.int8.known)

    def take(self, op: Any, inputs: set[str]) -> bool:
        """Refuse operations that read a torch tensor which this part computes: it exists when the part has run."""
        if op.part is type(self) and op.reads_tensors and not inputs.isdisjoint(each.output for each in self.ops):
            return False
        return super().take(op, inputs)

    def dtype(self, name: str) -> torch.dtype:
        return torch.uint8 if name in self.known else torch.float32

    def run(self, value: Callable[[str], Tensor], batch: int, runner: "Runner") -> dict[str, Tensor]:
        """Compute the outputs. `value` returns the value of a name."""
        given = self.take_inputs(value, batch)
        made = {name: torch.empty(batch, *self.forms[name], dtype=self.dtype(name)) for name in self.outputs}
        tensors = [*given.values(), *made.values()]
        images = self.group(batch)
        for first, each, groups in ((0, images, batch // images), (batch - batch % images, 1, batch % images)):
            if groups:
                addresses = structs.pointers([tensor[first:].data_ptr() for tensor in tensors])
                runner.run(self.program(each, runner), addresses, len(tensors), groups)
        return made

    def group(self, batch: int) -> int:
        """Return how many images share a plane: as few as possible, unless more fill the vectors much better."""
        best = 1
        for images in GROUPS[1:]:
            if images > batch or max(images * c * h * w for c, h, w in self.shapes.values()) > LARGEST_VALUE:
                break
            if self.bytes(images) < WORTH * self.bytes(best):
                best = images
        return best

    def bytes(self, images: int) -> float:
        """Return the multiply-adds per image, those of padding included."""
        sizes = ((op.nonzero, *self.shapes[op.output][1:]) for op in self.ops)
        return sum(n * -(-images * (h + (h > 1)) * (w + (w > 1)) // LINE) for n, h, w in sizes) / images

    def program(self, images: int, runner: "Runner") -> "Int8Program":
        """Return the program for a group of this many images; plan it at first use."""
        if images not in self.programs:
            self.programs[images] = Int8Program(self, images, runner.library, runner.tuner)
            runner.tuner.save()
        return self.programs[images]

    def rows(self) -> list[list[str]]:
        """Return the rows of the operations in the table of a compiled model."""
        tiles = {call.op.output: call.choice for p in self.programs.values() for call in p.steps if call.op is not None}
        return [op.describe(self.shapes[op.output], tiles.get(op.output)) for op in self.ops]


Int8Op.part = Int8Segment


class Int8Program:
    """The calls for one group of images. C repeats them for every group of a batch."""

    def __init__(self, segment: Int8Segment, images: int, library: Library, tuner: Tuner) -> None:
        self.segment, self.images = segment, images
        tensors = {name: self.tensor(i, name) for i, name in enumerate([*segment.inputs, *segment.outputs])}
        places = Places(segment.shapes, images, library, tensors)
        self.steps = make_calls(segment, places)
        values = set_lifetimes(self.steps)
        self.size = allocate(values)  # of the arena
        _memory, arena = structs.arena(self.size)
        ctypes.memset(arena, 0x3C, self.size)
        for call in self.steps:
            call.bind(library)
            call.tune(tuner, arena)
        self.array = (structs.Step * len(self.steps))(*(call.c for call in self.steps))
        self.sections = (Section * 1)(Section(structs.address(self.array), len(self.steps), 1))
        self.shared = images * segment.work() > SHARED * len(self.steps)  # should threads share the work of one group?

    def tensor(self, number: int, name: str) -> CallerTensor:
        bytes_each = self.segment.dtype(name).itemsize
        return CallerTensor(FIRST_TENSOR + number, self.segment.shapes[name], self.images, bytes_each)


def make_calls(segment: Int8Segment, places: Places) -> list[Call]:
    """Lay all operations out, then make their calls, and those that copy from and to torch's tensors."""
    places.choose_layouts(segment.ops, segment.outputs)
    makers = [op.lay_out(places) for op in segment.ops]
    calls = []
    for name in segment.inputs:
        if name in segment.known:
            calls.append(pack_call(places.tensors[name], places.known[name,], segment.known[name]))
    for op, make in zip(segment.ops, makers):
        calls += make()
        if op.output in segment.outputs and (op.output,) in places.known:
            calls.append(unpack_call(places.known[op.output,], places.tensors[op.output], op.out))
    return calls


def set_lifetimes(calls: list[Call]) -> list[Planes]:
    """Find the first and last call that needs each value, and the outputs that may overwrite an input. Return the values."""
    values: dict[Planes, None] = {}
    for i, call in enumerate(calls):
        for value in call.values:
            values[value] = None
            value.born, value.dies = i if value.born < 0 else value.born, i
    for call in calls:
        if call.in_place is not None and isinstance(call.output, Planes):
            call.output.overwrite(call.in_place)
    return list(values)
