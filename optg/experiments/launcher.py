"""Launchers start the commands of runs: in processes on this machine (the default), or elsewhere (ray_launcher.py)."""

import contextlib
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from optg.experiments.planned_run import PlannedRun
from optg.experiments.processes import process_environment, start_process


class RunningCommand(Protocol):
    """A started command. `subprocess.Popen` is one."""

    @property
    def returncode(self) -> int | None: ...

    def poll(self) -> int | None:
        """Return the exit status, or None while the command is running or waiting for a machine."""

    def send_signal(self, sig: int, /) -> None:
        """Send a signal to the command's process."""


@dataclass
class Job:
    """A run whose command was started."""

    run: PlannedRun
    slot: int
    process: RunningCommand
    started: float = field(default_factory=time.monotonic)


class Launcher(Protocol):
    def start(self, command: list[str], log: Path, slot: int) -> RunningCommand:
        """Start a command and append its output to a log. `slot` counts the commands that run at the same time."""


class LocalLauncher:
    """Start each command in a process of its own. GPUs are used in turn, CPU cores are divided among the jobs."""

    def __init__(self, jobs: int, device: str) -> None:
        self.jobs, self.device = jobs, device

    def start(self, command: list[str], log: Path, slot: int) -> RunningCommand:
        return start_process(command, log, process_environment(slot, self.jobs, self.device))


@contextlib.contextmanager
def interrupt_at_exit(jobs: list[Job]) -> Iterator[None]:
    """Interrupt the jobs that are still running at the end, so that an error here leaves no run behind."""
    try:
        yield
    finally:
        for job in jobs:
            job.process.send_signal(signal.SIGINT)
