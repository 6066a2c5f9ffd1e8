"""Compile the engine's C code with the system's compiler at first use, and cache it."""

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

C_FILES = Path(__file__).with_name("c")
FLAGS = ("-O2", "-std=gnu11", "-shared", "-fPIC", "-pthread", "-ffp-contract=fast")
ISAS = {
    "native": ("-march=native",),
    "avx512": ("-march=x86-64-v4", "-DLANES=16"),
    "avx2": ("-march=x86-64-v3", "-DLANES=8"),
    "scalar": ("-DLANES=1",),
}


class NoCompiler(OSError):
    """No C compiler was found, or it does not compile the engine."""


class Kernel(NamedTuple):
    """A convolution kernel computes `channels` × `rows` × `columns` vectors at once. Stride 0 means any."""

    channels: int
    rows: int
    columns: int
    stride: int
    framed: int = 0  # does it compute whole rows of an image and skip the padding?


class Library:
    """The compiled engine."""

    def __init__(self, path: Path) -> None:
        self.key = path.stem
        c = ctypes.CDLL(str(path))
        c.engine_pool.restype = ctypes.c_void_p
        for function in (c.engine_lanes, c.engine_kernel_count, c.engine_pool_threads, c.engine_time):
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
        shape = (ctypes.c_int32 * 5)()
        self.kernels: dict[Kernel, int] = {}
        for i in range(c.engine_kernel_count()):
            c.engine_kernel(i, shape)
            self.kernels[Kernel(*shape)] = i

    def function(self, name: str) -> int:
        """Return the address of a C function."""
        try:
            address = ctypes.cast(getattr(self.c, name), ctypes.c_void_p).value
        except AttributeError:
            raise LookupError(f"no C function {name}; expected it in a file of c/ops/ or in the operation's `source`") from None
        assert address is not None
        return address


def library(isa: str | None = None, sources: Sequence[Path] = ()) -> Library:
    """Return the engine for this machine; compile it if it is not in the cache.

    Args:
        isa: native (the default, unless $OPTG_ISA says otherwise), avx512, avx2 or scalar.
        sources: C files of operations from outside c/ops/.
    """
    return _library(isa or os.environ.get("OPTG_ISA") or "native", tuple(sources))


@functools.cache
def _library(isa: str, sources: tuple[Path, ...]) -> Library:
    if isa not in ISAS:
        raise ValueError(f"unknown instruction set {isa!r}; expected one of {', '.join(ISAS)}")
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        raise NoCompiler("no C compiler found (cc, gcc, clang, or the one $CC names)")
    command = [*compiler.split(), *FLAGS, *ISAS[isa]]
    path = cache() / f"engine-{key(command, sources)}.so"
    if path.exists():
        with contextlib.suppress(OSError, AttributeError):  # a damaged file is compiled again
            return Library(path)
    compile_to(path, command, sources)
    try:
        return Library(path)
    except (OSError, AttributeError) as error:
        path.unlink(missing_ok=True)
        raise NoCompiler(f"the compiled engine {path} cannot be loaded: {error}") from error


def unit(sources: Sequence[Path]) -> str:
    """Return the C code to compile: one unit that includes the engine and every operation."""
    files = [C_FILES / "engine.c", *sorted(C_FILES.glob("ops/*.c")), *sources]
    return "".join(f'#include "{file}"\n' for file in files)


def key(command: Sequence[str], sources: Sequence[Path]) -> str:
    """Return a key that changes with the C files, the compiler, its flags, and the CPU that `native` stands for."""
    try:
        version = subprocess.run([command[0], "--version"], capture_output=True, check=True, text=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        raise NoCompiler(f"the C compiler {command[0]} does not run: {error}") from error
    code = [path.read_text() for path in (*sorted(C_FILES.rglob("*.[ch]")), *sources)]
    parts = (*code, version, " ".join(command), platform.machine(), cpu_flags())
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def cpu_flags() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")


def compile_to(path: Path, command: Sequence[str], sources: Sequence[Path]) -> None:
    """Compile into a temporary file and rename it: another process must never see half a library."""
    handle, temporary = tempfile.mkstemp(suffix=".so", dir=path.parent)
    os.close(handle)
    try:
        command = [*command, "-x", "c", "-", "-o", temporary, "-lm"]
        done = subprocess.run(command, input=unit(sources), capture_output=True, text=True)
        if done.returncode:
            lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
            reason = next((line for line in lines if " error: " in line), lines[0])
            raise NoCompiler(f"{command[0]} does not compile the engine: {reason}")
        sync(Path(temporary))
        os.replace(temporary, path)
    except OSError as error:
        raise NoCompiler(str(error)) from error
    finally:
        Path(temporary).unlink(missing_ok=True)


@functools.cache
def cache() -> Path:
    """Return $OPTG_CACHE, or the folder optg in the user's cache; a temporary folder if that is not writable."""
    home = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    path = Path(os.environ.get("OPTG_CACHE") or os.path.join(home, "optg"))
    try:
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
        if os.access(path, os.W_OK):
            return path
    except OSError:
        pass
    return Path(tempfile.mkdtemp(prefix="optg-"))
