"""Compile the engine's C code with the system's compiler at first use, and cache it.

Whoever can write to the cache can run code as its user. So the cache is used only if nobody else can.
"""

import atexit
import contextlib
import ctypes
import functools
import hashlib
import os
import platform
import shutil
import stat
import subprocess
import tempfile
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from optg.files import sync

C_FILES = Path(__file__).with_name("c")
FLAGS = ("-O2", "-std=gnu11", "-shared", "-fPIC", "-pthread", "-ffp-contract=fast")
ISAS = {
    "native": ("-march=native",),  # not on ARM: see `native_isa`
    "avx512": ("-march=x86-64-v4", "-DLANES=16"),
    "avx_vnni": ("-march=x86-64-v3", "-mavxvnni", "-DLANES=8"),
    "avx2": ("-march=x86-64-v3", "-DLANES=8"),
    "neon_i8mm": ("-march=armv8.2-a+dotprod+i8mm", "-DLANES=4"),
    "neon_dotprod": ("-march=armv8.2-a+dotprod", "-DLANES=4"),
    "neon": ("-march=armv8-a", "-DLANES=4"),
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


class Int8Kernel(NamedTuple):
    """An int8 convolution kernel computes `width` filters on `vectors` vectors at once."""

    width: int
    vectors: int
    offset_unit: int
    block: int  # input channels that lie interleaved


class Library:
    """The compiled engine."""

    def __init__(self, path: Path) -> None:
        self.key = path.stem
        c = ctypes.CDLL(str(path))
        c.engine_pool.restype = ctypes.c_void_p
        counts = ("kernel_count", "int8_kernel_count", "pool_threads")
        for name in ("lanes", "span", "shift", "permutes", "finite", "time", *counts):
            function = getattr(c, f"engine_{name}")
            function.restype = ctypes.c_int64
        c.engine_pool.argtypes = [ctypes.c_int64, ctypes.c_int64]
        c.engine_finite.argtypes = [ctypes.c_void_p, ctypes.c_int64]
        c.engine_pool_free.argtypes = [ctypes.c_void_p]
        c.engine_pool_threads.argtypes = [ctypes.c_void_p]
        c.engine_run.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
        c.engine_run.restype = None
        c.engine_time.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64]
        for function in (c.engine_kernel, c.engine_int8_kernel):
            function.argtypes = [ctypes.c_int64, ctypes.c_void_p]
            function.restype = None
        self.c = c
        self.lanes: int = c.engine_lanes()
        self.span: int = c.engine_span()  # bytes of a vector in the int8 operations
        self.permutes = bool(c.engine_permutes())  # can it permute the bytes of a vector?
        self.shift: int = c.engine_shift()  # what int8 kernels subtract from a byte before they multiply it
        shape = (ctypes.c_int32 * 5)()
        self.kernels: dict[Kernel, int] = {}
        for i in range(c.engine_kernel_count()):
            c.engine_kernel(i, shape)
            self.kernels[Kernel(*shape)] = i
        self.int8_kernels: list[Int8Kernel] = []
        for i in range(c.engine_int8_kernel_count()):
            c.engine_int8_kernel(i, shape)
            self.int8_kernels.append(Int8Kernel(*shape[:4]))

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
        isa: native (the default, unless $OPTG_ISA says otherwise) or another one of `ISAS`.
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
    command = [*compiler.split(), *FLAGS, *ISAS[native_isa() if isa == "native" else isa]]
    path = cache() / f"engine-{key(command, sources)}.so"
    if is_private(path, stat.S_ISREG):
        with contextlib.suppress(OSError, AttributeError):  # a damaged file is compiled again
            return Library(path)
    compile_to(path, command, sources)
    try:
        return Library(path)
    except (OSError, AttributeError) as error:
        path.unlink(missing_ok=True)
        raise NoCompiler(f"the compiled engine {path} cannot be loaded: {error}") from error


def units(sources: Sequence[Path]) -> list[str]:
    """Return the C code to compile, in two units that take about as long: the many kernels of convolution.c, and the rest."""
    convolution = C_FILES / "ops" / "convolution.c"
    others = [path for path in sorted(C_FILES.glob("ops/*.c")) if path != convolution]
    lists = [C_FILES / "vectors.h", C_FILES / "program.h", convolution], [C_FILES / "engine.c", *others, *sources]
    return ["".join(f'#include "{file}"\n' for file in files) for files in lists]


def key(command: Sequence[str], sources: Sequence[Path]) -> str:
    """Return a key that changes with the C files, the compiler, its flags, and the CPU that `native` stands for."""
    try:
        version = subprocess.run([command[0], "--version"], capture_output=True, check=True, text=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        raise NoCompiler(f"the C compiler {command[0]} does not run: {error}") from error
    code = [path.read_text() for path in (*sorted(C_FILES.rglob("*.[ch]")), *sources)]
    parts = (*code, version, " ".join(command), platform.machine(), cpu_flags())
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def native_isa() -> str:
    """Return the best instruction set for this CPU, by name on ARM: some compilers there do not know -march=native."""
    if platform.machine() not in ("aarch64", "arm64"):
        return "native"
    flags = cpu_flags().split()
    has_dotprod = "asimddp" in flags or platform.system() == "Darwin"  # all of Apple's CPUs that run macOS
    if has_dotprod and "i8mm" in flags:
        return "neon_i8mm"
    return "neon_dotprod" if has_dotprod else "neon"


def cpu_flags() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")


def compile_to(path: Path, command: Sequence[str], sources: Sequence[Path]) -> None:
    """Compile into a temporary folder, and move the result: another process must never see half a library."""
    try:
        with tempfile.TemporaryDirectory(dir=path.parent) as folder, ThreadPoolExecutor() as threads:
            codes = units(sources)
            objects = [f"{folder}/{i}.o" for i in range(len(codes))]
            calls = [threads.submit(run, [*command, "-c", "-x", "c", "-", "-o", o], c) for o, c in zip(objects, codes)]
            for call in calls:
                call.result()
            made = Path(folder) / path.name
            run([*command, *objects, "-o", str(made), "-lm"])
            made.chmod(0o700)  # linkers ask for 0o777
            sync(made)
            os.replace(made, path)
    except NoCompiler:
        raise
    except OSError as error:
        raise NoCompiler(str(error)) from error


def run(command: Sequence[str], code: str = "") -> None:
    """Run a compiler or linker. Raise NoCompiler with its first error."""
    done = subprocess.run(command, input=code, capture_output=True, text=True)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        reason = next((line for line in lines if " error: " in line), lines[0])
        raise NoCompiler(f"{command[0]} does not compile the engine: {reason}")


@functools.cache
def cache() -> Path:
    """Return $OPTG_CACHE, or the folder optg in the user's cache; a new temporary folder if others can write to that one."""
    home = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    path = Path(os.path.abspath(os.environ.get("OPTG_CACHE") or os.path.join(home, "optg")))
    try:
        create_private(path)
        path = path.resolve(strict=True)
        problem = "" if os.access(path, os.W_OK) else "it is not writable"
        if not is_private(path, stat.S_ISDIR):
            problem = "it must belong to you, and nobody else may write to it"
        elif exposed := next((folder for folder in path.parents if is_exposed(folder)), None):
            problem = f"other users can replace it, because they can write to {exposed}"
    except OSError as error:
        problem = str(error)
    if not problem:
        return path
    private = Path(tempfile.mkdtemp(prefix="optg-"))
    atexit.register(shutil.rmtree, private, ignore_errors=True)
    warnings.warn(f"the cache {path} is not used: {problem}. The engine is compiled anew in each process", stacklevel=2)
    return private


def create_private(path: Path) -> None:
    """Create a folder and its missing parents, which only the user can write to."""
    if not path.is_dir():
        create_private(path.parent)
        with contextlib.suppress(FileExistsError):
            path.mkdir(mode=0o700)


def is_private(path: Path, is_kind: Callable[[int], bool]) -> bool:
    """Return whether a file or folder exists, is of this kind, belongs to the user, and cannot be written by others."""
    try:
        found = path.lstat()
    except OSError:
        return False
    return is_kind(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o022


def is_exposed(folder: Path) -> bool:
    """Return whether another user but root can rename what is in a folder: the sticky bit of /tmp prevents it."""
    found = folder.stat()
    by_anyone = bool(found.st_mode & stat.S_IWOTH) and not found.st_mode & stat.S_ISVTX
    return by_anyone or found.st_uid not in (0, os.geteuid())
