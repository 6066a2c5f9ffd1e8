"""Run optg's commands in forked children: importing torch once takes longer than a whole run of the small model."""

import contextlib
import ctypes
import gc
import importlib
import io
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
MODULES = (
    "torch._dynamo", "torch.distributed.tensor", "torch.distributed.fsdp", "optg.cli.train", "optg.cli.evaluate",
    "optg.cli.export", "optg.cli.predict", "optg.cli.report", "optg.cli.verify", "optg.training.arguments", "optg.training.run",
    "optg.training.progress", "optg.training.saved", "optg.training.evaluation", "optg.deploy.export", "optg.deploy.predict",
    "optg.report", "optg.report.page", "optg.data.own", "optg.data.memory", "rich.progress", "torch.export", "torch._export",
    "tests.training.user_code",
)  # fmt: skip
LIMIT = 300.0  # seconds after which a command counts as hanging


@dataclass
class Outcome:
    """How a command ended: its exit status (negative: the signal that ended it) and what it printed."""

    status: int
    text: str
    calls: list[str]  # file-system calls, if they were counted

    @property
    def is_clear(self) -> bool:
        """Whether the command did its work, or said in one line why not."""
        return self.status == 0 or (self.status in (1, 2) and "Traceback" not in self.text and bool(self.text.strip()))


def prepare() -> None:
    """Import in this process what the children need."""
    import torch

    torch.set_num_threads(1)
    for module in MODULES:
        with contextlib.suppress(ModuleNotFoundError):
            importlib.import_module(module)
    fill_caches()
    gc.collect()
    gc.freeze()  # a collection in a child would copy every page of the parent


def fill_caches() -> None:
    """Parse the arguments of a training: reading the comments of all options takes longer than the small run itself."""
    from optg.methods import METHODS
    from optg.training.arguments import parse_train_args

    for method in METHODS:
        parse_train_args(["--method", method])


def start(*args: object, before: Callable[[], None] = lambda: None, env: dict[str, str] | None = None) -> "Child":
    """Start `optg ARGS` in a forked child. `before` is called in the child first."""
    output = tempfile.TemporaryFile()  # noqa: SIM115
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        run_in_child(output, [str(arg) for arg in args], before, env or {})
    return Child(pid, output)


def run_in_child(output: io.IOBase, args: list[str], before: Callable[[], None], env: dict[str, str]) -> None:
    status = 1
    try:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
        sys.stdout = sys.stderr = os.fdopen(1, "w", buffering=1, closefd=False)
        os.environ.update(env)
        sys.argv = ["optg", *args]
        before()
        from optg import cli

        cli.main()
        status = 0
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        calls = LIBRARY.fault_disarm().decode() if LIBRARY else ""
        with contextlib.suppress(Exception):
            sys.stdout.flush()
        os.write(output.fileno(), b"\0" + calls.encode())
        os._exit(status)


@dataclass
class Child:
    pid: int
    output: io.IOBase
    status: int | None = None

    def poll(self) -> int | None:
        if self.status is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.status = os.waitstatus_to_exitcode(status) if pid else None
        return self.status

    def wait(self, seconds: float = LIMIT) -> Outcome:
        """Wait for the end. A command that takes longer is killed, and its text says so."""
        end, late = time.monotonic() + seconds, ""
        while self.poll() is None:
            if time.monotonic() > end:
                self.kill()
                late = f"\nTraceback: still running after {seconds:.0f} seconds"
            time.sleep(0.002)
        self.output.seek(0)
        text, _, calls = self.output.read().decode(errors="replace").partition("\0")
        assert self.status is not None
        return Outcome(self.status, text + late, calls.splitlines())

    def kill(self, number: int = signal.SIGKILL) -> None:
        with contextlib.suppress(ProcessLookupError):
            if self.status is None:
                os.kill(self.pid, number)


def optg(*args: object, before: Callable[[], None] = lambda: None) -> Outcome:
    """Run a command to its end."""
    return start(*args, before=before).wait()


LIBRARY: ctypes.CDLL | None = None


def preload() -> None:
    """Start this program again with the fault library preloaded, unless it is; then load its functions."""
    global LIBRARY
    if "OPTG_FAULTS" not in os.environ:
        folder = Path(tempfile.mkdtemp())
        library = folder / "faults.so"
        subprocess.run(["cc", "-O1", "-shared", "-fPIC", "-o", library, ROOT / "tests/campaign/faults.c", "-ldl"], check=True)
        env = {**os.environ, "LD_PRELOAD": str(library), "OPTG_FAULTS": str(library)}
        status = subprocess.run([sys.executable, "-m", main_module(), *sys.argv[1:]], env=env).returncode
        shutil.rmtree(folder)
        sys.exit(status)
    LIBRARY = ctypes.CDLL(os.environ["OPTG_FAULTS"])
    LIBRARY.fault_disarm.restype = ctypes.c_char_p


def main_module() -> str:
    spec = sys.modules["__main__"].__spec__
    assert spec is not None
    return spec.name


def arm(folder: Path, call: int, fault: int) -> Callable[[], None]:
    """Return what a child does first to meet a fault at one call below a folder."""
    return lambda: LIBRARY.fault_arm(str(folder).encode(), ctypes.c_long(call), fault) if LIBRARY else None
