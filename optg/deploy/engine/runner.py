"""Run a compiled network: threads, memory, and its parts, of which some run in the engine and others in torch."""

from collections.abc import Callable
from time import perf_counter
from typing import Any

import torch

from optg.deploy.engine import structs
from optg.deploy.engine.build import Library
from optg.deploy.engine.lower import Network, TorchCall
from optg.deploy.engine.plan import Program, Segment, cuts
from optg.deploy.engine.tune import Tuner, fastest
from optg.deploy.graph import filled as fill_refs
from optg.deploy.graph import resolve
from optg.machine import cores

Lookup = Callable[[str], Any]  # the value of that name


class Misfit(Exception):
    """A value has another shape than the one planned for: torch then runs the model."""


class Runner:
    def __init__(self, library: Library, threads: int) -> None:
        self.library = library
        self.pool: int | None = library.c.engine_pool(threads, cores()) if threads > 1 else None
        self.threads: int = library.c.engine_pool_threads(self.pool) if self.pool else 1
        self.arenas: list[tuple[Any, int]] = []
        self.arena_size = 0
        self.times: dict[Program, Any] = {}  # a benchmark may ask for the nanoseconds of each step

    def run(self, program: Program, addresses: Any, count: int, groups: int) -> None:
        """Run a program on groups of images. Each thread takes the same number of whole groups; they share the others."""
        each = groups - groups % self.threads if self.threads > 1 and program.shared else groups
        for first, n, together in ((0, each, 0), (each, groups - each, 1)):
            if n:
                arenas = self.workspace(program.size, 1 if together else min(self.threads, n))
                self.launch(program, addresses, count, arenas, first, n, together)

    def launch(self, program: Program, addresses: Any, count: int, arenas: Any, first: int, groups: int, together: int) -> None:
        sections, times = program.sections, self.times.get(program)
        task = structs.Run(
            structs.address(sections), len(sections), structs.address(addresses), count, structs.address(arenas),
            first, groups, together, None if times is None else times.ctypes.data,
        )  # fmt: skip
        pool = self.pool if together or groups > 1 else None  # one group needs one thread
        self.library.c.engine_run(pool, structs.address(task))

    def workspace(self, size: int, number: int) -> Any:
        """Return arenas for this many threads. They are kept between calls."""
        if size > self.arena_size:
            self.arenas, self.arena_size = [], size
        while len(self.arenas) < number:
            self.arenas.append(structs.arena(self.arena_size))
        return structs.pointers([address for _, address in self.arenas])

    def time(self, program: Program) -> float:
        """Return the seconds for one group on each thread: the best of two runs, after a first."""
        segment, images = program.segment, program.images * self.threads
        values = [torch.zeros(images, *segment.shapes[name]) for name in (*segment.inputs, *segment.outputs)]
        addresses = structs.pointers([value.data_ptr() for value in values])
        taken = []
        for _ in range(3):
            start = perf_counter()
            self.run(program, addresses, len(values), self.threads)
            taken.append(perf_counter() - start)
        return min(taken)

    def close(self) -> None:
        if self.pool:
            self.library.c.engine_pool_free(self.pool)
            self.pool = None


class TorchPart:
    """A node that torch runs."""

    def __init__(self, call: TorchCall) -> None:
        self.node, self.inputs, self.outputs = call.node, call.inputs, [call.output]
        self.new_tensors: list[str] = []  # torch may return a view of an input

    def run(self, value: Lookup, batch: int) -> dict[str, Any]:
        known = {name: value(name) for name in self.inputs}
        args, kwargs = fill_refs(self.node.args, known), fill_refs(self.node.kwargs, known)
        return {self.node.name: resolve(self.node.op)(*args, **kwargs)}

    def rows(self) -> list[list[str]]:
        """Return its row in the table of a compiled model; sizes have none."""
        shown = self.node.op.startswith("aten.") and ".sym_" not in self.node.op
        return [[self.node.name, f"torch {self.node.op}"]] if shown else []


class EnginePart:
    """A segment that the engine runs, and its programs by the number of images in a group."""

    def __init__(self, segment: Segment, network: Network, runner: Runner, tuner: Tuner) -> None:
        self.segment, self.runner, self.tuner = segment, runner, tuner
        self.inputs, self.outputs, self.new_tensors = segment.inputs, segment.outputs, segment.outputs
        self.forms = network.forms
        self.programs: dict[int, Program] = {}

    def run(self, value: Lookup, batch: int) -> dict[str, Any]:
        given = [value(name).contiguous() for name in self.inputs]
        for name, tensor in zip(self.inputs, given):
            if tensor.shape != (batch, *self.forms[name]):
                raise Misfit(f"{name} is {'×'.join(map(str, tensor.shape))} then")
        made = {name: torch.empty(batch, *self.forms[name]) for name in self.outputs}
        tensors = [*given, *made.values()]
        done = 0
        for images, groups in split(batch, self.runner.library.lanes):
            addresses = structs.pointers([(tensor[done:] if done else tensor).data_ptr() for tensor in tensors])
            self.runner.run(self.program(images), addresses, len(tensors), groups)
            done += images * groups
        return made

    def program(self, images: int) -> Program:
        """Return the program for a group of this many images; plan it at first use."""
        if images not in self.programs:
            known = self.tuner.known_cut(self.segment, images)
            choices = cuts(self.segment, images) if images > 1 else [0]
            if known is not None and images > 1 and 0 <= known <= len(self.segment.ops):
                choices = [known]
            programs = [Program(self.segment, images, cut, self.runner.library, self.tuner) for cut in choices]
            program = programs[0]
            if len(programs) > 1:
                program = fastest(programs, self.runner.time)
                self.tuner.remember_cut(self.segment, images, program.cut)
            self.programs[images] = program
            self.tuner.save()
        return self.programs[images]

    def rows(self) -> list[list[str]]:
        """Return the rows of its operations in the table of a compiled model."""
        tiles = {step.op.output: step.choice for p in self.programs.values() for step in p.steps if step.op is not None}
        return [op.describe(self.segment.shapes[op.output], tiles.get(op.output)) for op in self.segment.ops]


Part = TorchPart | EnginePart


def split(batch: int, lanes: int) -> list[tuple[int, int]]:
    """Split a batch into groups: (images in a group, number of such groups). It does not depend on the number of threads."""
    whole, rest = divmod(batch, lanes)
    groups = [(lanes, whole)] if whole else []
    if rest and 2 * rest >= lanes > 2:
        return [*groups, (rest, 1)]
    return [*groups, (1, rest)] if rest else groups


def make_parts(network: Network, runner: Runner, tuner: Tuner) -> list[Part]:
    return [TorchPart(p) if isinstance(p, TorchCall) else EnginePart(p, network, runner, tuner) for p in network.parts]
