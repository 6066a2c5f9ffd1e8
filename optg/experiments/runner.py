"""Runs side by side: each is an `optg train` of its own, in a folder of its own, that goes on where it was.

One that has ended is not started again; one that fails is named with its log while the others go on; a signal is passed on, and
the same command goes on later.
"""

import contextlib
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.table import Table

from optg.experiments import record
from optg.experiments.declaration import Run
from optg.training import folder as run_folder

POLL = 0.1  # seconds between two looks at the processes


@dataclass
class Job:
    """A run at work."""

    run: Run
    slot: int
    process: subprocess.Popen[bytes]
    started: float = field(default_factory=time.monotonic)


class Runner:
    def __init__(
        self,
        output: Path,
        *,
        jobs: int = 1,
        device: str = "auto",
        record_file: Path | None = None,
        minutes: float | None = None,
        console: Console | None = None,
    ) -> None:
        self.output, self.jobs, self.device, self.record_file = output, jobs, device, record_file
        self.deadline = None if minutes is None else time.monotonic() + 60 * minutes
        self.console = console or Console()
        self.recorded = record.beside(record_file)
        self.known = record.known(output, self.recorded)
        self.waiting: list[Run] = []
        self.running: list[Job] = []
        self.done = 0
        self.total = 0
        self.failed: list[str] = []
        self.unrecorded = False
        self.elsewhere: set[str] = set()  # names of runs that another process trains
        self.signal: int | None = None
        self.signals = 0

    def run(self, runs: list[Run]) -> int:
        """Until all have ended or failed, or a signal came. Returns the exit status."""
        self.waiting = [run for run in runs if not self.finished(run, runs)]
        self.total, self.done = len(runs), len(runs) - len(self.waiting)
        for run in runs:
            if run.key in self.known and run.key not in self.recorded:
                self.keep(self.known[run.key])
        self.say(f"{self.total} runs, {self.done} done before")
        with self.listening():
            self.run_here() if self.jobs == 0 else self.run_beside()
        if self.signal is not None:
            self.say(f"stopped with {self.done} of {self.total} runs done; the same command goes on from there")
            return 128 + self.signal
        for name in self.failed:
            self.say(f"failed: {name}, see {self.log(name)}")
        return 1 if self.failed or self.unrecorded else 0

    def finished(self, run: Run, runs: list[Run]) -> bool:
        """Is there nothing to do? A model that others start from must be there too."""
        return run.key in self.known and (self.has_model(run) or all(other.key in self.known for other in based_on(run, runs)))

    def recorded_since(self, run: Run) -> bool:
        """Has another command recorded it by now? Then it need not be run, unless its model is what is wanted."""
        try:
            now = record.beside(self.record_file)
        except (ValueError, OSError):  # `keep` will say so
            return False
        if run.key in self.known or run.key not in now or based_on(run, self.waiting):
            return False
        self.known[run.key] = now[run.key]
        self.done += 1
        self.say(f"{self.done}/{self.total} {run.name}: recorded by another command")
        return True

    def has_model(self, run: Run) -> bool:
        return (self.output / run.name / "model.safetensors").is_file() and (self.output / run.name / "summary.json").is_file()

    # ---- in processes of their own

    def run_beside(self) -> None:
        self.output.mkdir(parents=True, exist_ok=True)
        with self.live(), self.leaving_none_behind():
            while (self.waiting or self.running) and not (self.signal and not self.running):
                if self.signal is None:
                    self.start_some()
                    if not self.running and not self.elsewhere:  # what is left waits for a run that failed
                        self.give_up()
                if self.deadline and time.monotonic() > self.deadline and self.signal is None:
                    self.say("time is up: the runs save and stop")
                    self.note(signal.SIGINT, None)
                time.sleep(POLL)
                for job in [job for job in self.running if job.process.poll() is not None]:
                    self.running.remove(job)
                    self.ended(job.run, job.process.returncode, time.monotonic() - job.started)

    @contextlib.contextmanager
    def leaving_none_behind(self) -> Iterator[None]:
        """Whatever goes wrong here, no run trains on unseen."""
        try:
            yield
        finally:
            for job in self.running:
                job.process.send_signal(signal.SIGINT)

    def start_some(self) -> None:
        for run in list(self.waiting):
            if len(self.running) >= self.jobs:
                return
            if self.busy(run) or (run.needs is not None and not self.has_model(run.needs)):
                continue
            self.waiting.remove(run)
            if run.name in self.elsewhere and self.has_model(run):
                self.ended(run, 0, 0.0)
            elif not self.recorded_since(run):
                self.start(run)
            self.elsewhere.discard(run.name)

    def busy(self, run: Run) -> bool:
        """Does another command train it? It then is waited for."""
        if run_folder.in_use(self.output / run.name):
            if run.name not in self.elsewhere:
                self.elsewhere.add(run.name)
                self.say(f"another process trains {run.name}: waiting for it")
            return True
        return False

    def give_up(self) -> None:
        for run in self.waiting:
            self.failed.append(run.name)
            self.log(run.name).write_text("the run that this one starts from has no model\n")
            self.say(f"not started: {run.name}, since {run.needs.name if run.needs else '?'} has no model")
        self.waiting = []

    def start(self, run: Run) -> None:
        slot = next(i for i in range(self.jobs) if i not in {job.slot for job in self.running})
        self.log(run.name).parent.mkdir(parents=True, exist_ok=True)
        command = self.command(run)
        with self.log(run.name).open("ab") as log:
            log.write(f"$ {shlex.join(command)}\n".encode())
            log.flush()
            # a session of its own: Ctrl-C in a terminal reaches this process alone, which passes it on once
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, env=self.environment(slot),
                start_new_session=True,
            )  # fmt: skip
        self.running.append(Job(run, slot, process))
        self.say(f"started {run.name}")

    def command(self, run: Run) -> list[str]:
        return [sys.executable, "-m", "optg", *self.arguments(run)]

    def arguments(self, run: Run) -> list[str]:
        return [*run.arguments, "--output", str(self.output / run.name), "--device", self.device]

    def environment(self, slot: int) -> dict[str, str]:
        """Of a process: its GPU, in turn, and its share of the cores."""
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        env = {"OMP_NUM_THREADS": str(max(1, cores // max(1, self.jobs))), **os.environ, "PYTHONUNBUFFERED": "1"}
        gpus = visible_gpus() if self.device in ("auto", "cuda") else []
        if len(gpus) > 1:
            env["CUDA_VISIBLE_DEVICES"] = gpus[slot % len(gpus)]
        return env

    # ---- in this process

    def run_here(self) -> None:
        """One after the other, with no new process for each: for runs of a second."""
        from optg.training.arguments import parse_train_args
        from optg.training.run import run_training

        if self.deadline is not None:  # whoever hears signals then, a run or this command
            signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGINT))
            signal.setitimer(signal.ITIMER_REAL, max(self.deadline - time.monotonic(), 0.001))
        for run in list(self.waiting):
            if self.signal is not None:
                return
            self.waiting.remove(run)
            started, arguments, before = time.monotonic(), self.arguments(run), sys.argv
            self.log(run.name).parent.mkdir(parents=True, exist_ok=True)
            sys.argv = ["optg", *arguments]
            with self.log(run.name).open("a") as log, contextlib.redirect_stdout(log), contextlib.redirect_stderr(log):
                try:
                    run_training(*parse_train_args(arguments[1:]))
                    status = 0
                except SystemExit as leaving:
                    status = leaving.code if isinstance(leaving.code, int) else 1
                    self.signal = status - 128 if status > 128 else self.signal
                except Exception:
                    traceback.print_exc()
                    status = 1
                finally:
                    sys.argv = before
            self.ended(run, status, time.monotonic() - started)

    # ---- what comes of a run

    def ended(self, run: Run, status: int, seconds: float) -> None:
        path = self.output / run.name / "summary.json"
        if path.is_file():
            try:
                summary = record.checked(json.loads(path.read_text()), str(path))
            except ValueError as error:
                self.failed.append(run.name)
                self.say(f"failed: {run.name}: its summary.json is damaged: {error}")
                return
            if record.key_of(summary) == run.key:
                self.known.setdefault(run.key, summary)
                self.done += 1
                self.keep(summary)
                self.say(
                    f"{self.done}/{self.total} {run.name}: accuracy {summary['accuracy']:.2%} at sparsity "
                    f"{summary['sparsity']:.2%}, {seconds:.0f} s"
                )
                return
            with self.log(run.name).open("a") as log:
                log.write("the summary is of another run than the one declared\n")
        if self.signal is not None:
            return
        if self.jobs and self.busy(run):  # another process has begun it in the same moment
            self.waiting.append(run)
            return
        self.failed.append(run.name)
        self.say(f"failed with exit status {status}: {run.name}: {last_line(self.log(run.name))}; see {self.log(run.name)}")

    def keep(self, summary: dict[str, Any]) -> None:
        """Record it, unless this or another record beside it has it."""
        try:
            if self.record_file and record.key_of(summary) not in record.beside(self.record_file):
                record.append(self.record_file, summary)
        except (ValueError, OSError) as error:
            self.unrecorded = True
            self.say(f"not recorded: {error}; the same command will, once that is mended")

    def log(self, name: str) -> Path:
        return self.output / "logs" / f"{name}.log"

    # ---- signals

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        before = {number: signal.signal(number, self.note) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
        before[signal.SIGALRM] = signal.getsignal(signal.SIGALRM)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            for number, handler in before.items():
                signal.signal(number, handler)

    def note(self, number: int, frame: FrameType | None) -> None:
        """Pass a signal on: the first lets runs save and stop, a second stops them at once. In this process, a run that
        trains hears it itself; before it does, there is nothing to save."""
        if self.jobs == 0:
            raise SystemExit(128 + number)
        self.signal, self.signals = number, self.signals + 1
        if self.signals == 1:
            self.say(f"runs save and stop: {len(self.running)}; once more: at once")
        for job in self.running:
            with contextlib.suppress(ProcessLookupError):
                job.process.send_signal(signal.SIGKILL if self.signals > 2 else signal.SIGINT)

    # ---- what a person sees

    def say(self, text: str) -> None:
        self.console.print(text, highlight=False, soft_wrap=True, markup=False)

    @contextlib.contextmanager
    def live(self) -> Iterator[None]:
        if not self.console.is_terminal:
            yield
            return
        with Live(get_renderable=self.view, console=self.console, refresh_per_second=2, transient=True):
            yield

    def view(self) -> Table:
        table = Table(title=f"{self.done} of {self.total} done, {len(self.waiting)} wait, {len(self.failed)} failed")
        for column in ("run", "epoch", "accuracy", "sparsity", "seconds"):
            table.add_column(column, justify="left" if column == "run" else "right", overflow="fold")
        for job in self.running:
            row = last_metrics(self.output / job.run.name / "metrics.jsonl")
            epoch = f"{row['epoch'] if row else 0}/{job.run.plan.recipe.epochs}"
            figures = (f"{row['accuracy']:.2%}", f"{row['sparsity']:.2%}") if row else ("", "")
            table.add_row(job.run.name, epoch, *figures, f"{time.monotonic() - job.started:.0f}")
        return table


def based_on(run: Run, runs: list[Run]) -> list[Run]:
    """Those that start from its model."""
    return [other for other in runs if other.needs is not None and other.needs.key == run.key]


def last_metrics(path: Path) -> dict[str, Any] | None:
    try:
        return json.loads(path.read_text().splitlines()[-1])
    except (OSError, ValueError, IndexError):  # not there yet, or half a line
        return None


def last_line(path: Path) -> str:
    lines = path.read_text(errors="replace").strip().splitlines()
    return lines[-1] if lines else "it said nothing"


def visible_gpus() -> list[str]:
    """What CUDA_VISIBLE_DEVICES can be set to."""
    if given := os.environ.get("CUDA_VISIBLE_DEVICES"):
        return given.split(",")
    import torch

    return [str(i) for i in range(torch.cuda.device_count())]


@contextlib.contextmanager
def multi_process_service(wanted: bool) -> Iterator[None]:
    """NVIDIA's MPS, with which the kernels of several processes share one GPU at a time. One that runs already is used."""
    control = shutil.which("nvidia-cuda-mps-control")
    if not wanted:
        yield
        return
    if control is None:
        raise ValueError("--mps needs nvidia-cuda-mps-control, which is not installed here; leave it out")

    def ask(text: str) -> int:
        return subprocess.run([control], input=text.encode(), capture_output=True, timeout=30).returncode

    if ask("get_server_list\n") == 0:
        yield
        return
    with tempfile.TemporaryDirectory(prefix="mps-", ignore_cleanup_errors=True) as folder:
        before = dict(os.environ)
        os.environ["CUDA_MPS_PIPE_DIRECTORY"], os.environ["CUDA_MPS_LOG_DIRECTORY"] = folder, folder
        try:
            started = subprocess.run([control, "-d"], capture_output=True, text=True, timeout=30)
            if started.returncode:
                reason = (started.stderr or started.stdout).strip().splitlines()
                raise ValueError(f"MPS could not be started ({reason[-1] if reason else started.returncode}); leave out --mps")
            yield
        finally:
            ask("quit\n")
            os.environ.clear()
            os.environ.update(before)
