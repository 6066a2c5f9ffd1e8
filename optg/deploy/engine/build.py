"""The C code of the engine, compiled by the system's compiler at first use and kept in the user's cache."""

import contextlib
import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from optg.files import sync

SOURCE = Path(__file__).with_name("engine.c")
FLAGS = ("-O2", "-std=gnu11", "-shared", "-fPIC", "-pthread", "-ffp-contract=fast")
ISAS = {
    "native": ("-march=native",),
    "avx512": ("-march=x86-64-v4", "-DLANES=16"),
    "avx2": ("-march=x86-64-v3", "-DLANES=8"),
    "scalar": ("-DLANES=1",),
}


class NoCompiler(OSError):
    """There is no C compiler here, or it does not compile the engine."""


class Kernel(NamedTuple):
    """What a convolution kernel makes at once: `channels` × `rows` × `columns` vectors. Stride 0: any."""

    channels: int
    rows: int
    columns: int
    stride: int
    framed: int = 0  # does it make whole rows of an image, without the padding?


class Library:
    """The compiled engine."""

    def __init__(self, path: Path) -> None:
        self.key = path.stem
        c = ctypes.CDLL(str(path))
        c.engine_pool.restype = ctypes.c_void_p
        for function in (c.engine_lanes, c.engine_accumulators, c.engine_kernel_count, c.engine_pool_threads, c.engine_time):
            function.restype = ctypes.c_int64
        c.engine_pool.argtypes = [ctypes.c_int64, ctypes.c_int64]
        c.engine_pool_free.argtypes = [ctypes.c_void_p]
        c.engine_pool_threads.argtypes = [ctypes.c_void_p]
        c.engine_run.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
        c.engine_run.restype = None
        c.engine_time.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64]
        c.engine_kernel.argtypes = [ctypes.c_int64, ctypes.c_void_p]
        c.engine_kernel.restype = None
        self.c = c
        self.lanes: int = c.engine_lanes()
        self.accumulators: int = c.engine_accumulators()
        shape = (ctypes.c_int32 * 5)()
        self.kernels: dict[Kernel, int] = {}
        for i in range(c.engine_kernel_count()):
            c.engine_kernel(i, shape)
            self.kernels[Kernel(*shape)] = i


def library(isa: str | None = None, extra: Sequence[str] = ()) -> Library:
    """The engine for this machine, compiled if it is not in the cache.

    Args:
        isa: native (the default, or what $OPTG_ISA says), avx512, avx2 or scalar.
        extra: further flags for the compiler.
    """
    return _library(isa or os.environ.get("OPTG_ISA") or "native", tuple(extra))


@functools.cache
def _library(isa: str, extra: tuple[str, ...]) -> Library:
    if isa not in ISAS:
        raise ValueError(f"unknown instruction set {isa!r}; expected one of {', '.join(ISAS)}")
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        raise NoCompiler("no C compiler found (cc, gcc, clang, or what $CC names)")
    command = [*compiler.split(), *FLAGS, *ISAS[isa], *extra]
    path = cache() / f"engine-{key(command)}.so"
    if path.exists():
        with contextlib.suppress(OSError, AttributeError):  # a damaged one is compiled again
            return Library(path)
    compile_to(path, command)
    try:
        return Library(path)
    except (OSError, AttributeError) as error:
        path.unlink(missing_ok=True)
        raise NoCompiler(f"the compiled engine {path} cannot be loaded: {error}") from error


def key(command: Sequence[str]) -> str:
    """Changes with the source, the compiler, its flags, and the CPU that `native` stands for."""
    try:
        version = subprocess.run([command[0], "--version"], capture_output=True, check=True, text=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        raise NoCompiler(f"the C compiler {command[0]} does not run: {error}") from error
    parts = (SOURCE.read_text(), version, " ".join(command), platform.machine(), cpu_flags())
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def cpu_flags() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")


def compile_to(path: Path, command: Sequence[str]) -> None:
    """Into a temporary file first: others may be doing the same, and none may see half a library."""
    handle, temporary = tempfile.mkstemp(suffix=".so", dir=path.parent)
    os.close(handle)
    try:
        done = subprocess.run([*command, str(SOURCE), "-o", temporary, "-lm"], capture_output=True, text=True)
        if done.returncode:
            reason = next(iter(done.stderr.strip().splitlines()), f"exit code {done.returncode}")
            raise NoCompiler(f"{command[0]} does not compile the engine: {reason}")
        sync(Path(temporary))
        os.replace(temporary, path)
    except OSError as error:
        raise NoCompiler(str(error)) from error
    finally:
        Path(temporary).unlink(missing_ok=True)


@functools.cache
def cache() -> Path:
    """$OPTG_CACHE, or optg in the user's cache folder; a temporary folder where that cannot be written."""
    home = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    path = Path(os.environ.get("OPTG_CACHE") or os.path.join(home, "optg"))
    try:
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
        if os.access(path, os.W_OK):
            return path
    except OSError:
        pass
    return Path(tempfile.mkdtemp(prefix="optg-"))
