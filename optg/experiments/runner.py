"""Run several `optg train` commands, each in its own folder and by default in its own process.

Finished runs are not repeated and interrupted runs resume. If a run fails, the others continue. A signal is forwarded to the
runs, which save and stop; the same command continues later.
"""

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

from rich.console import Console
from rich.table import Table

from optg import trust
from optg.experiments.history import RunHistory
from optg.experiments.launcher import Job, Launcher, LocalLauncher, interrupt_at_exit
from optg.experiments.planned_run import PlannedRun, run_key
from optg.experiments.processes import last_line, train_here
from optg.experiments.progress import jobs_table, live_table
from optg.experiments.records import read_summary
from optg.terminal import PlainConsole
from optg.training import folder as run_folder
from optg.training.run_files import RunFiles

POLL_SECONDS = 0.1


class Runner:
    def __init__(
        self,
        output: Path,
        *,
        jobs: int = 1,  # runs at a time; 0: train in this process
        device: str = "auto",
        launcher: Launcher | None = None,
        record_file: Path | None = None,
        minutes: float | None = None,
        console: Console | None = None,
    ) -> None:
        self.output, self.jobs, self.device = output, jobs, device
        self.launcher = launcher or LocalLauncher(jobs, device)
        self.deadline = None if minutes is None else time.monotonic() + 60 * minutes
        self.console = console or PlainConsole()
        self.history = RunHistory(output, record_file)
        self.waiting: list[PlannedRun] = []
        self.running: list[Job] = []
        self.done = 0
        self.total = 0
        self.failed: list[str] = []
        self.recording_failed = False
        self.elsewhere: set[str] = set()  # names of runs that another process is training
        self.signal: int | None = None
        self.signals = 0

    def run(self, runs: list[PlannedRun]) -> int:
        """Run until all runs have finished or failed, or a signal arrives. Return the exit status."""
        self.waiting = [run for run in runs if not self.finished_before(run, runs)]
        self.total, self.done = len(runs), len(runs) - len(self.waiting)
        for summary in self.history.unrecorded(runs):
            self.record(summary)
        self.say(f"{self.total} runs, {self.done} finished before")
        with handle_signals(self.on_signal):
            self.run_here() if self.jobs == 0 else self.run_in_processes()
        if self.signal is not None:
            self.say(f"stopped with {self.done} of {self.total} runs finished; run the same command again to continue")
            return 128 + self.signal
        for name in self.failed:
            self.say(f"failed: {name}, see {self.log(name)}")
        return 1 if self.failed or self.recording_failed else 0

    def finished_before(self, run: PlannedRun, runs: list[PlannedRun]) -> bool:
        """Return whether the run need not be run. If unfinished runs start from it, its model must exist too."""
        if not self.history.has(run):
            return False
        return self.has_model(run) or all(self.history.has(other) for other in runs_starting_from(run, runs))

    def has_model(self, run: PlannedRun) -> bool:
        return RunFiles(self.output / run.name).finished

    # ---- in separate processes

    def run_in_processes(self) -> None:
        self.output.mkdir(parents=True, exist_ok=True)
        with live_table(self.console, self.progress), interrupt_at_exit(self.running):
            while (self.waiting or self.running) and not (self.signal and not self.running):
                if self.signal is None:
                    self.start_waiting()
                    if not self.running and not self.elsewhere:  # the remaining runs start from a run that failed
                        self.give_up()
                if self.deadline and time.monotonic() > self.deadline and self.signal is None:
                    self.say("time is up: the runs save and stop")
                    self.on_signal(signal.SIGINT, None)
                time.sleep(POLL_SECONDS)
                for job in [job for job in self.running if job.process.poll() is not None]:
                    self.running.remove(job)
                    self.ended(job.run, job.process.returncode or 0, time.monotonic() - job.started)

    def start_waiting(self) -> None:
        """Start waiting runs while there are free slots."""
        for run in list(self.waiting):
            if len(self.running) >= self.jobs:
                return
            if self.is_running_elsewhere(run) or (run.starts_from is not None and not self.has_model(run.starts_from)):
                continue
            self.waiting.remove(run)
            if run.name in self.elsewhere and self.has_model(run):
                self.ended(run, 0, 0.0)
            elif not runs_starting_from(run, self.waiting) and self.history.recorded_meanwhile(run):
                self.done += 1
                self.say(f"{self.done}/{self.total} {run.name}: recorded by another command")
            else:
                self.start(run)
            self.elsewhere.discard(run.name)

    def is_running_elsewhere(self, run: PlannedRun) -> bool:
        """Return whether another process is training the run. If so, this one waits for it."""
        if not run_folder.in_use(self.output / run.name):
            return False
        if run.name not in self.elsewhere:
            self.elsewhere.add(run.name)
            self.say(f"another process is training {run.name}: waiting for it")
        return True

    def give_up(self) -> None:
        for run in self.waiting:
            self.failed.append(run.name)
            self.log(run.name).write_text("the run that this one starts from has no model\n")
            self.say(f"not started: {run.name}, because {run.starts_from.name if run.starts_from else '?'} has no model")
        self.waiting = []

    def start(self, run: PlannedRun) -> None:
        slot = next(i for i in range(self.jobs) if i not in {job.slot for job in self.running})
        self.running.append(Job(run, slot, self.launcher.start(self.command(run), self.log(run.name), slot)))
        self.say(f"started {run.name}")

    def command(self, run: PlannedRun) -> list[str]:
        return [*trust.python(), "-m", "optg", *self.arguments(run)]

    def arguments(self, run: PlannedRun) -> list[str]:
        return [*run.arguments, "--output", str(self.output / run.name), "--device", self.device]

    # ---- in this process

    def run_here(self) -> None:
        """Train one run after the other without new processes, for runs that take a second."""
        if self.deadline is not None:  # interrupts a run that is training, or else this command
            signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGINT))
            signal.setitimer(signal.ITIMER_REAL, max(self.deadline - time.monotonic(), 0.001))
        for run in list(self.waiting):
            if self.signal is not None:
                return
            self.waiting.remove(run)
            started = time.monotonic()
            status = train_here(self.arguments(run), self.log(run.name))
            self.signal = status - 128 if status > 128 else self.signal
            self.ended(run, status, time.monotonic() - started)

    # ---- the end of a run

    def ended(self, run: PlannedRun, status: int, seconds: float) -> None:
        """Record a run that finished; report one that failed."""
        try:
            summary, _ = read_summary(self.output / run.name)
        except ValueError as error:
            self.failed.append(run.name)
            self.say(f"failed: {run.name}: its summary.json is damaged: {error}")
            return
        if summary is not None:
            if run_key(summary) == run.key:
                self.finished(run, summary, seconds)
                return
            with self.log(run.name).open("a") as log:
                log.write("summary.json describes another run than the planned one\n")
        if self.signal is not None:
            return
        if self.jobs and self.is_running_elsewhere(run):  # another process started it at the same moment
            self.waiting.append(run)
            return
        self.failed.append(run.name)
        self.say(f"failed with exit status {status}: {run.name}: {last_line(self.log(run.name))}; see {self.log(run.name)}")

    def finished(self, run: PlannedRun, summary: dict[str, Any], seconds: float) -> None:
        self.history.add(run, summary)
        self.done += 1
        self.record(summary)
        self.say(
            f"{self.done}/{self.total} {run.name}: accuracy {summary['accuracy']:.2%} at sparsity "
            f"{summary['sparsity']:.2%}, {seconds:.0f} s"
        )

    def record(self, summary: dict[str, Any]) -> None:
        """Add a summary to the record file. An error is reported and does not stop the runs."""
        try:
            self.history.record(summary)
        except (ValueError, OSError) as error:
            self.recording_failed = True
            self.say(f"not recorded: {error}; fix this and run the same command again to record it")

    def log(self, name: str) -> Path:
        return self.output / "logs" / f"{name}.log"

    # ---- signals

    def on_signal(self, number: int, frame: FrameType | None) -> None:
        """Forward a signal: after the first the runs save and stop, after the second they stop immediately.

        With jobs=0 a training run handles signals itself; before it trains there is nothing to save.
        """
        if self.jobs == 0:
            raise SystemExit(128 + number)
        self.signal, self.signals = number, self.signals + 1
        if self.signals == 1:
            self.say(f"{len(self.running)} runs save and stop; Ctrl-C again to stop immediately")
        for job in self.running:
            with contextlib.suppress(ProcessLookupError):
                job.process.send_signal(signal.SIGKILL if self.signals > 2 else signal.SIGINT)

    def progress(self) -> Table:
        title = f"{self.done} of {self.total} finished, {len(self.waiting)} waiting, {len(self.failed)} failed"
        return jobs_table(title, self.running, self.output)

    def say(self, text: str) -> None:
        self.console.print(text, highlight=False, soft_wrap=True, markup=False)


def runs_starting_from(run: PlannedRun, runs: list[PlannedRun]) -> list[PlannedRun]:
    return [other for other in runs if other.starts_from is not None and other.starts_from.key == run.key]


@contextlib.contextmanager
def handle_signals(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Call the handler on SIGINT, SIGTERM and SIGHUP. Restore the earlier handlers, and SIGALRM's, at the end."""
    before = {number: signal.signal(number, handler) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    before[signal.SIGALRM] = signal.getsignal(signal.SIGALRM)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, earlier in before.items():
            signal.signal(number, earlier)
