"""Threads and memory to run programs with."""

from time import perf_counter
from typing import Any, Protocol

import torch

from optg.deploy.engine import structs
from optg.deploy.engine.build import Library
from optg.deploy.engine.plan import Program
from optg.deploy.engine.tune import Tuner
from optg.machine import cores


class Runnable(Protocol):
    """The steps for one group of images."""

    size: int  # of the arena
    sections: Any
    shared: bool  # whether threads may share the work of one group


class Runner:
    """Runs programs on a fixed number of threads. Results do not depend on that number."""

    def __init__(self, library: Library, threads: int, tuner: Tuner) -> None:
        self.library, self.tuner = library, tuner
        self.pool: int | None = library.c.engine_pool(threads, cores()) if threads > 1 else None
        self.threads: int = library.c.engine_pool_threads(self.pool) if self.pool else 1
        self.arenas: list[tuple[Any, int]] = []
        self.arena_size = 0
        self.times: dict[Runnable, Any] = {}  # a benchmark may ask for the nanoseconds of each step

    def run(self, program: Runnable, addresses: Any, count: int, groups: int) -> None:
        """Run a program on groups of images. Each thread takes the same number of groups; all share the work of the rest."""
        each = groups - groups % self.threads if self.threads > 1 and program.shared else groups
        for first, n, together in ((0, each, 0), (each, groups - each, 1)):
            if n:
                arenas = self.workspace(program.size, 1 if together else min(self.threads, n))
                self.launch(program, addresses, count, arenas, first, n, together)

    def launch(
        self, program: Runnable, addresses: Any, count: int, arenas: Any, first: int, groups: int, together: int
    ) -> None:
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
        """Return the seconds for one group on each thread: the fastest of three runs."""
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
