"""Engines that run in a process of their own: on other CPUs, which QEMU emulates, and with sanitizers.

The planner works as always. Instead of being called, the engine gets a file with the run and all memory that it uses; replay.c,
compiled with the engine for the other CPU, repeats the run and writes the memory back.
"""

import ctypes
import functools
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest

from optg.deploy.engine import build, structs
from optg.deploy.engine.int8.segment import Int8Segment

HERE = Path(__file__).parent
FLAGS = [flag for flag in build.FLAGS if flag not in ("-shared", "-fPIC")]
KERNELS = "TO_4(K,1,1,1) TO_3(K,1,2,1) TO_3(K,1,1,2) TO_2(K,1,1,0) TO_2(K,2,1,1) TO_2(K,2,2,1) TO_2(K,4,1,1)"
SHORT = f"-DKERNELS(K)={KERNELS}"  # few kernels for convolutions of floats compile faster
SANITIZED = (SHORT, "-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
ENVIRONMENT = {**os.environ, "ASAN_OPTIONS": "detect_leaks=0"}


@dataclass(frozen=True)
class Target:
    """How the engine is compiled and run."""

    flags: tuple[str, ...]
    cpu: str = ""  # that QEMU emulates; none: this one
    needs: str = ""  # a flag of this CPU

    @property
    def compiler(self) -> str:
        return "aarch64-linux-gnu-gcc" if self.cpu else "cc"

    @property
    def emulator(self) -> list[str]:
        return ["qemu-aarch64", "-L", "/usr/aarch64-linux-gnu", "-cpu", self.cpu] if self.cpu else []

    @property
    def lacking(self) -> str:
        """Why it cannot run here; empty if it can."""
        tools = [tool for tool in (self.compiler, *self.emulator[:1]) if not shutil.which(tool)]
        if tools:
            return f"QEMU and a cross compiler are needed; {' and '.join(tools)} is missing"
        if self.needs and self.needs not in build.cpu_flags().split():
            return f"this CPU has no {self.needs}"
        return "the sanitizers are not installed" if "-O1" in self.flags and not has_sanitizers() else ""


@functools.cache
def has_sanitizers() -> bool:
    find = ["cc", "-print-file-name=libasan.so"]
    return os.path.isabs(subprocess.run(find, capture_output=True, text=True).stdout)


TARGETS = {
    "neon_i8mm": Target(build.ISAS["neon_i8mm"], "max"),
    "neon_dotprod": Target(build.ISAS["neon_dotprod"], "neoverse-n1"),
    "neon": Target(build.ISAS["neon"], "cortex-a53"),
    "avx_vnni_as_avx512": Target(
        (*build.ISAS["avx2"], "-mavx512vl", "-mavx512vnni", "-include", str(HERE / "vnni.h"), SHORT), needs="avx512_vnni"
    ),
    "native_sanitized": Target((*build.ISAS["native"], *SANITIZED)),
    "avx512_sanitized": Target((*build.ISAS["avx512"], *SANITIZED), needs="avx512vl"),
    "avx_vnni_sanitized": Target((*build.ISAS["avx_vnni"], *SANITIZED), needs="avx_vnni"),
    "avx2_sanitized": Target((*build.ISAS["avx2"], *SANITIZED), needs="avx2"),
    "scalar_sanitized": Target((*build.ISAS["scalar"], *SANITIZED)),
}


def parameters(*names: str) -> list[Any]:
    """Return targets as parameters of a test. They are for `make test-long`."""
    reasons = [TARGETS[name].lacking for name in names]
    marks = [[pytest.mark.long, pytest.mark.skipif(bool(reason), reason=reason)] for reason in reasons]
    return [pytest.param(name, marks=mark) for name, mark in zip(names, marks)]


class Chunk(NamedTuple):
    """A piece of memory."""

    address: int
    size: int
    has_pointers: bool = False

    @classmethod
    def of(cls, thing: Any) -> "Chunk":
        """Return the memory of an array or of a C struct."""
        if isinstance(thing, np.ndarray):
            kinds = [kind for kind, *_ in (thing.dtype.fields or {}).values()]
            return cls(thing.ctypes.data, thing.nbytes, np.uint64 in kinds)
        return cls(ctypes.addressof(thing), ctypes.sizeof(thing), True)

    @property
    def content(self) -> bytes:
        return ctypes.string_at(self.address, self.size)


class Engine:
    """Stands in for a `Library`."""

    def __init__(self, target: Target, sources: Sequence[Path]) -> None:
        sources = [*sources, HERE / "replay.c"]
        command = [target.compiler, *FLAGS, "-rdynamic", *target.flags]
        self.key = f"replay-{build.key(command, sources)}"
        path = build.cache() / self.key
        if not path.exists():
            build.compile_to(path, command, sources)
        self.command = [*target.emulator, str(path)]
        known = json.loads(subprocess.run(self.command, capture_output=True, check=True, env=ENVIRONMENT).stdout)
        self.lanes, self.span, self.shift, self.permutes = (known[name] for name in ("lanes", "span", "shift", "permutes"))
        self.kernels = {build.Kernel(*shape[: len(build.Kernel._fields)]): i for i, shape in enumerate(known["kernels"])}
        self.int8_kernels = [build.Int8Kernel(*shape[: len(build.Int8Kernel._fields)]) for shape in known["int8_kernels"]]
        self.names: dict[str, Any] = {}
        self.tensors: list[Chunk] = []
        self.memory: list[Chunk] = []
        self.c = SimpleNamespace(
            engine_finite=lambda address, count: True,
            engine_pool=lambda threads, cores: threads,
            engine_pool_threads=lambda threads: threads,
            engine_pool_free=lambda threads: None,
            engine_run=self.run,
        )

    def function(self, name: str) -> int:
        """Return the address of a function's name. replay.c finds the function."""
        return ctypes.addressof(self.names.setdefault(name, ctypes.create_string_buffer(name.encode())))

    def prepare(self, program: Any, addresses: Any, arenas: Any, groups: int) -> None:
        """Find all memory of a run."""
        segment = program.segment
        names = [*segment.inputs, *segment.outputs]
        each = [segment.dtype(name).itemsize if isinstance(segment, Int8Segment) else 4 for name in names]
        sizes = [number * int(np.prod(segment.shapes[name])) for name, number in zip(names, each)]
        self.tensors = [Chunk(start, size * program.images * groups) for start, size in zip(addresses, sizes)]
        steps = [Chunk(part.steps, part.count * ctypes.sizeof(structs.Step), True) for part in program.sections]
        owned = [thing for step in program.steps for thing in (step.own, *step.arrays) if thing is not None]
        self.memory = [Chunk(start, program.size) for start in arenas]
        self.memory += [*steps, *map(Chunk.of, (program.sections, addresses, arenas, *owned, *self.names.values()))]

    def run(self, pool: int | None, task: int) -> None:
        """Repeat a run in the other process."""
        every = [Chunk(task, ctypes.sizeof(structs.Run), True), *self.tensors, *self.memory]
        memory = list({chunk.address: chunk for chunk in every if chunk.size}.values())
        links = find_pointers(memory)
        head = np.array([pool or 1, len(memory), len(links), *(chunk.size for chunk in memory)], np.int64)
        with tempfile.NamedTemporaryFile() as file:
            file.write(head.tobytes() + links.tobytes() + b"".join(chunk.content for chunk in memory))
            file.flush()
            done = subprocess.run([*self.command, file.name], capture_output=True, text=True, env=ENVIRONMENT)
            assert done.returncode == 0, f"the engine failed with {done.returncode}: {done.stderr[-3000:]}"
            file.seek(head.nbytes + links.nbytes)
            for chunk in memory:
                content = file.read(chunk.size)
                if chunk in self.tensors:
                    ctypes.memmove(chunk.address, content, chunk.size)


def find_pointers(memory: Sequence[Chunk]) -> np.ndarray:
    """Return every pointer from one chunk to another: chunk and offset, target and offset there."""
    addresses, sizes = (np.array(values, np.int64) for values in list(zip(*memory))[:2])
    order = np.argsort(addresses)
    found = [np.empty((0, 4), np.int64)]
    for i, chunk in enumerate(memory):
        if chunk.has_pointers:
            words = np.frombuffer(chunk.content, np.int64, chunk.size // 8)
            target = order[np.searchsorted(addresses[order], words, side="right") - 1]
            inside = (words >= addresses[target]) & (words < addresses[target] + sizes[target])
            [at] = np.nonzero(inside)
            target = target[at]
            found.append(np.stack([np.full(len(at), i), 8 * at, target, words[at] - addresses[target]], axis=1))
    return np.concatenate(found)


@functools.cache
def engine(name: str, sources: tuple[Path, ...]) -> Engine:
    return Engine(TARGETS[name], sources)
