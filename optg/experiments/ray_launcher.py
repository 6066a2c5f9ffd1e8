"""Start runs as tasks of a Ray cluster: `optg reproduce NAME --launcher ray`.

All nodes need optg, and the current folder and the run folders under the same paths, on a disk that they share. If a node or a
process dies, Ray starts the run again elsewhere, and the run resumes from its checkpoint.
"""

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from optg import trust

RETRIES = 3  # per run
POLL_SECONDS = 0.2


class RunKilled(Exception):
    """A run was killed, or stopped by a signal that did not come from the launcher."""


class RayLauncher:
    """Start each command as a Ray task, as soon as the cluster has room for it."""

    def __init__(self, *, gpus: float | None = None, cpus: float = 1.0, device: str = "auto") -> None:
        try:
            import ray
        except ImportError as error:
            raise ValueError(f"--launcher ray needs a missing package ({error}); run: pip install 'optg[ray]'") from None
        if not ray.is_initialized():
            try:
                ray.init(address=os.environ.get("RAY_ADDRESS", "auto"), log_to_driver=False)
            except ConnectionError as error:
                raise ValueError(
                    f"--launcher ray found no cluster ({str(error).splitlines()[0]}); start one with `ray start --head`, or "
                    "name yours: RAY_ADDRESS=HOST:6379"
                ) from None
        resources = ray.cluster_resources()
        if gpus is None:
            gpus = 1.0 if device != "cpu" and resources.get("GPU") else 0.0
        for name, wanted in (("GPU", gpus), ("CPU", cpus)):
            if wanted > resources.get(name, 0.0):
                raise ValueError(f"a run needs {wanted:g} {name}s; the Ray cluster has {resources.get(name, 0.0):g}")
        self.task: Any = ray.remote(run_command)
        self.options = {"max_retries": RETRIES, "retry_exceptions": [RunKilled], "num_gpus": gpus, "num_cpus": cpus}

    def start(self, command: list[str], log: Path, slot: int) -> "RayRun":
        log.parent.mkdir(parents=True, exist_ok=True)
        stop_file = log.absolute().with_suffix(".stop")
        stop_file.unlink(missing_ok=True)
        task = self.task.options(name=log.stem, **self.options)
        return RayRun(task.remote(command, Path.cwd(), log.absolute(), stop_file, trust.allowed()), log, stop_file)


class RayRun:
    """A command that a Ray task runs. A signal reaches it through a file in the shared folder."""

    def __init__(self, reference: Any, log: Path, stop_file: Path) -> None:
        self.reference, self.log, self.stop_file = reference, log, stop_file
        self.returncode: int | None = None

    def poll(self) -> int | None:
        import ray

        if self.returncode is None and ray.wait([self.reference], timeout=0)[0]:
            try:
                self.returncode = ray.get(self.reference)
            except ray.exceptions.RayError as error:  # out of retries
                self.returncode = 1
                with self.log.open("a") as log:
                    log.write(f"Ray gave up: {str(error).strip().splitlines()[-1]}\n")
            self.stop_file.unlink(missing_ok=True)
        return self.returncode

    def send_signal(self, sig: int) -> None:
        with self.stop_file.open("a") as file:
            file.write(f"{int(sig)}\n")


def run_command(command: list[str], folder: Path, log_path: Path, stop_file: Path, trusted: Sequence[str] = ()) -> int:
    """Run a command on a node of the cluster and append its output to a log. Return its exit status.

    Args:
        trusted: names of code that the user allowed where the command was given.
    """
    if stop_file.exists():
        return 128 + signal.SIGINT
    command = [sys.executable, *command[1:]]  # this node's Python
    with log_path.open("ab") as log:
        process = subprocess.Popen(
            command,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, "PYTHONUNBUFFERED": "1", trust.VARIABLE: "\n".join(trusted)},
            preexec_fn=prepare_process,
        )
        sent = 0
        while process.poll() is None:
            signals = stop_file.read_text().split() if stop_file.exists() else []
            for number in signals[sent:]:
                process.send_signal(int(number))
            sent = len(signals)
            time.sleep(POLL_SECONDS)
    if not stop_file.exists() and (process.returncode < 0 or process.returncode in (130, 143)):
        raise RunKilled(f"the run ended with exit status {process.returncode}")
    return process.returncode


def prepare_process() -> None:
    """Accept signals, which Ray's workers block, and die with the worker: a retry on another node must not meet a leftover."""
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
