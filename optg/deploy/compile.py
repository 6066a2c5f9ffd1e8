"""optg.compile: a model -> inference on a CPU that skips the zeros.

fast = optg.compile(model, example_input)
y = fast(x)                                  # as model.eval()(x)
print(fast)                                  # how each layer runs
"""

import io
import os
import threading
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any, NoReturn
from weakref import WeakSet

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from optg.core.accounting import as_arguments
from optg.deploy.engine import structs
from optg.deploy.engine.build import Library, NoCompiler, library
from optg.deploy.engine.lower import Lowered, lower
from optg.deploy.engine.net import Conv, Op
from optg.deploy.engine.plan import Program, Segment, cuts
from optg.deploy.engine.tune import Tuner, fastest
from optg.deploy.graph import Graph, Node, capture, check_inputs, filled, in_order, refs_in, resolve, run
from optg.machine import cores


def compile(model: nn.Module, example_input: Any, threads: int | None = None, *, isa: str | None = None) -> "Compiled":
    """A copy of the model, in evaluation mode, that runs on the CPU and skips zero weights.

    Args:
        example_input: what the model is called with: a tensor, a tuple of tensors, or a dict of named ones. The batch may later
            have any other size, if the model allows it; what has to be planned for it is, when it is first seen.
        threads: how many; by default as many as torch uses. Results do not depend on it.
        isa: native, avx512, avx2 or scalar, to compile the engine for.
    """
    if threads is not None and (not isinstance(threads, int) or threads < 1):
        raise ValueError(f"threads is {threads}; expected a whole number of at least 1")
    graph = capture(model, example_input)
    for name, dtype in zip(graph.inputs, graph.dtypes):
        if dtype != torch.float32:
            raise ValueError(f"the input {name} is of {dtype}; the engine takes torch.float32")
    fast = Compiled(graph, threads or torch.get_num_threads(), isa)
    args, kwargs = as_arguments(example_input)
    fast(*(value.cpu() for value in args), **{name: value.cpu() for name, value in kwargs.items()})  # plans for this batch
    return fast


class Misfit(Exception):
    """A value has another shape than was planned for: torch then runs the model."""


@dataclass
class Part:
    """A segment, with its programs: for groups of so many images."""

    segment: Segment
    programs: dict[int, Program]


class Compiled:
    """A model that the engine runs. `notes` says what runs in torch instead, and why."""

    def __init__(self, graph: Graph, threads: int, isa: str | None = None) -> None:
        self.graph = Graph(**{**vars(graph), "tensors": {n: t.detach().clone() for n, t in graph.tensors.items()}})
        self.weights_at = set(map(storage, self.graph.tensors.values()))
        self.threads = threads
        self.notes: list[str] = []
        self.library: Library | None = None
        self.lock = threading.Lock()
        COMPILED.add(self)
        self.pool: int | None = None
        self.arenas: list[tuple[Any, int]] = []
        self.arena_size = 0
        self.times: dict[Program, Any] | None = None  # nanoseconds of each step, where a benchmark asks for them
        try:
            self.library = library(isa)
        except NoCompiler as error:
            self.notes.append(f"everything runs in torch: {error}")
            warnings.warn(f"optg.compile falls back to torch: {error}", stacklevel=3)
            return
        self.lowered: Lowered = lower(self.graph)
        self.notes += self.lowered.notes
        self.tuner = Tuner(self.library)
        self.parts = segments(self.lowered, self.graph)
        self.last = last_uses(self.parts, self.lowered, self.graph)
        made = {name for part in self.parts if isinstance(part, Part) for name in part.segment.outputs}
        returned = [self.lowered.root(name) for name in refs_in(self.graph.outputs)]
        self.fresh = set(returned) <= made and len(set(returned)) == len(returned)  # is each output a new tensor?
        if threads > 1:
            self.pool = self.library.c.engine_pool(threads, cores())
            self.threads = self.library.c.engine_pool_threads(self.pool) if self.pool else 1

    def __call__(self, *inputs: Tensor, **named: Tensor) -> Any:
        inputs = in_order(self.graph, inputs, named)
        batch = check_inputs(self.graph, inputs)
        for name, value in zip(self.graph.inputs, inputs):
            if value.dtype != torch.float32 or value.device.type != "cpu":
                raise ValueError(f"the input {name} is {value.dtype} on {value.device}; the engine takes torch.float32 on cpu")
        with torch.no_grad():
            if self.library is not None:
                try:
                    with self.lock:
                        outputs = self.execute([value.detach() for value in inputs], batch)
                    return outputs if self.fresh else self.own(outputs, inputs)
                except (Misfit, MemoryError) as reason:
                    if (note := f"batches of {batch} run in torch: {reason}") not in self.notes:
                        self.notes.append(note)
            return self.own(run(self.graph, *inputs), inputs)

    def own(self, outputs: Any, inputs: Sequence[Tensor]) -> Any:
        """Outputs that share no memory with inputs, weights or each other: a model may return what it was given."""
        taken = self.weights_at | set(map(storage, inputs))

        def copied(value: Any) -> Any:
            if isinstance(value, Tensor) and storage(value) in taken:
                value = value.clone()
            taken.update([storage(value)] if isinstance(value, Tensor) else [])
            return value

        return tree_map(copied, outputs)

    def execute(self, inputs: list[Tensor], batch: int) -> Any:
        values: dict[str, Any] = dict(zip(self.graph.inputs, inputs))

        def value(name: str) -> Any:
            """A value as torch wants it, under any of its names."""
            if name in values:
                return values[name]
            if name in self.graph.tensors:
                return self.graph.tensors[name]
            return values[self.lowered.root(name)].reshape(batch, *self.lowered.forms[name])

        for i, part in enumerate(self.parts):
            if isinstance(part, Node):
                known = {name: value(name) for name in refs_in((part.args, part.kwargs))}
                values[part.name] = resolve(part.op)(*filled(part.args, known), **filled(part.kwargs, known))
            else:
                given = [value(name).contiguous() for name in part.segment.inputs]
                for name, tensor in zip(part.segment.inputs, given):
                    if tensor.shape != (batch, *self.lowered.forms[name]):
                        raise Misfit(f"{name} is {'×'.join(map(str, tensor.shape))} then")
                values.update(self.run_part(part, given, batch))
            for name in self.last.get(i, ()):
                values.pop(name, None)
        return filled(self.graph.outputs, {name: value(name) for name in refs_in(self.graph.outputs)})

    def run_part(self, part: Part, given: list[Tensor], batch: int) -> dict[str, Tensor]:
        made = {name: torch.empty(batch, *self.lowered.forms[name]) for name in part.segment.outputs}
        if batch == 0:
            return made
        addresses = structs.pointers([t.data_ptr() for t in (*given, *made.values())])
        done = 0
        for images, groups in self.groups(batch):
            program = self.program(part, images)
            tensors = [*given, *made.values()]
            if done:
                addresses = structs.pointers([t[done:].data_ptr() for t in tensors])
            self.run_groups(program, addresses, len(tensors), groups)
            done += images * groups
        return made

    def groups(self, batch: int) -> list[tuple[int, int]]:
        """A batch as groups: (images in one, how many such groups). Independent of the number of threads."""
        lanes = self.library.lanes if self.library else 1
        whole, rest = divmod(batch, lanes)
        plan = [(lanes, whole)] if whole else []
        if rest and 2 * rest >= lanes > 2:
            return [*plan, (rest, 1)]
        return [*plan, (1, rest)] if rest else plan

    def run_groups(self, program: Program, addresses: Any, count: int, groups: int) -> None:
        """Groups that come out even go to one thread each; threads share the work of each of the others, if it is enough."""
        each = groups - groups % self.threads if self.threads > 1 and program.shared else groups
        for first, n, together in ((0, each, 0), (each, groups - each, 1)):
            if n:
                arenas = self.workspace(program.size, 1 if together else min(self.threads, n))
                self.launch(program, addresses, count, arenas, first, n, together)

    def launch(self, program: Program, addresses: Any, count: int, arenas: Any, first: int, groups: int, together: int) -> None:
        assert self.library is not None
        sections, times = program.sections, self.times.get(program) if self.times is not None else None
        task = structs.Run(
            structs.address(sections), len(sections), structs.address(addresses), count, structs.address(arenas),
            first, groups, together, None if times is None else times.ctypes.data,
        )  # fmt: skip
        pool = self.pool if together or groups > 1 else None  # there is no need to wake others
        self.library.c.engine_run(pool, structs.address(task))

    def workspace(self, size: int, number: int) -> Any:
        """Arenas for so many threads, kept between calls."""
        if size > self.arena_size:
            self.arenas, self.arena_size = [], size
        while len(self.arenas) < number:
            self.arenas.append(structs.arena(self.arena_size))
        return structs.pointers([address for _, address in self.arenas])

    def program(self, part: Part, images: int) -> Program:
        """How a group of so many images runs, planned when it is first asked for."""
        assert self.library is not None
        if images not in part.programs:
            segment = part.segment
            known = self.tuner.known_cut(segment, images)
            choices = cuts(segment, images) if images > 1 else [0]
            if known is not None and images > 1 and 0 <= known <= len(segment.ops):
                choices = [known]
            programs = [Program(segment, images, cut, self.library, self.tuner) for cut in choices]
            part.programs[images] = programs[0]
            if len(programs) > 1:
                part.programs[images] = fastest(programs, self.time)
                self.tuner.remember_cut(segment, images, part.programs[images].cut)
            self.tuner.save()
        return part.programs[images]

    def time(self, program: Program) -> float:
        """Seconds for a group on each thread, the best of two after a first."""
        segment, images = program.segment, program.images * self.threads
        values = [torch.zeros(images, *segment.shapes[name]) for name in (*segment.inputs, *segment.outputs)]
        addresses = structs.pointers([value.data_ptr() for value in values])
        taken = []
        for _ in range(3):
            start = perf_counter()
            self.run_groups(program, addresses, len(values), self.threads)
            taken.append(perf_counter() - start)
        return min(taken)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError("a compiled model cannot be copied or pickled: it holds threads and addresses; compile the model again")

    def __del__(self) -> None:
        if getattr(self, "pool", None) and self.library is not None:
            self.library.c.engine_pool_free(self.pool)
            self.pool = None

    def summary(self) -> Table:
        """How each layer runs."""
        table = Table("layer", "runs as", "shape", "density", "tile")
        if self.library is None:
            return table
        for part in self.parts:
            if isinstance(part, Node):
                if part.op.startswith("aten.") and ".sym_" not in part.op:
                    table.add_row(part.name, f"torch {part.op}")
                continue
            tilings = {k: t for p in part.programs.values() for k, t in p.tilings.items()}
            for op in part.segment.ops:
                table.add_row(*describe(op, part.segment, tilings))
        return table

    def __repr__(self) -> str:
        stream = io.StringIO()
        console = Console(file=stream, width=110)
        console.print(self.summary())
        for note in self.notes:
            console.print(f"note: {note}", soft_wrap=True, highlight=False)
        return stream.getvalue().rstrip()


COMPILED: WeakSet[Compiled] = WeakSet()


def unlock() -> None:
    """In a process that was forked while some thread was inside a call: that thread is not there to end it."""
    for fast in COMPILED:
        fast.lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=unlock)


def storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def describe(op: Op, segment: Segment, tilings: dict[str, Any]) -> list[str]:
    kind = type(op).__name__.lower()
    extras = [op.activation.label] if op.activation.label else []
    shape = "×".join(map(str, segment.shapes[op.output]))
    if not isinstance(op, Conv):
        return [op.output, " + ".join([kind, *extras]), shape, "", ""]
    density = op.nonzero / op.weight.size
    tile = tilings.get(op.output)
    shared = tile is not None and tile.channels > 1
    kernel = "×".join(map(str, op.window.kernel))
    parts = [f"{'dense' if shared else 'sparse'} {kernel}", *(["add"] if len(op.inputs) > 1 else []), *extras]
    return [op.name, " + ".join(parts), shape, f"{density:.1%}", "×".join(map(str, tile[:3])) if tile else ""]


def segments(lowered: Lowered, graph: Graph) -> list[Any]:
    """Runs of the engine's operations, and torch's nodes between them."""
    parts: list[Any] = []
    ops: list[Op] = []
    outputs = {lowered.root(name) for name in refs_in(graph.outputs)}

    def wanted_later(name: str, index: int) -> bool:
        for item in lowered.order[index:]:
            used = item.inputs if isinstance(item, Op) else list(refs_in((item.args, item.kwargs)))
            if name in map(lowered.root, used):
                return True
        return name in outputs

    def close(index: int) -> None:
        if ops:
            made = [op.output for op in ops]
            inputs = list(dict.fromkeys(n for op in ops for n in op.inputs if n not in made))
            later = [name for name in made if wanted_later(name, index)]
            parts.append(Part(Segment(list(ops), inputs, later, lowered.shapes), {}))
            ops.clear()

    for index, item in enumerate(lowered.order):
        if isinstance(item, Op):
            ops.append(item)
        else:
            close(index)
            parts.append(item)
    close(len(lowered.order))
    return parts


def last_uses(parts: list[Any], lowered: Lowered, graph: Graph) -> dict[int, list[str]]:
    """Which values are not needed any more after each part."""
    kept = {lowered.root(name) for name in refs_in(graph.outputs)} | set(refs_in(graph.outputs))
    last: dict[str, int] = {}
    for i, part in enumerate(parts):
        used = refs_in((part.args, part.kwargs)) if isinstance(part, Node) else part.segment.inputs
        for name in used:
            last[name] = last[lowered.root(name)] = i
    over: dict[int, list[str]] = {}
    for name, i in last.items():
        if name not in kept:
            over.setdefault(i, []).append(name)
    return over
