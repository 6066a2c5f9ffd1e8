"""The runner, with short scripts in place of `optg train`."""

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

import pytest
from rich.console import Console

from optg.experiments import records
from optg.experiments.declaration import Selection, load_experiment
from optg.experiments.planned_run import PlannedRun
from optg.experiments.records import append_record, read_records
from optg.experiments.runner import Runner
from optg.training.folder import RunFolder
from tests.experiments.fake_summaries import fake_summary

SCRIPT = """
import json, os, signal, sys, time
from pathlib import Path
folder, text, behaviour = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
folder.mkdir(parents=True, exist_ok=True)
(folder / "started").write_text((folder / "started").read_text() + "again" if (folder / "started").exists() else "once")
def stop(number, frame):
    print("saved"); sys.exit(130)
signal.signal(signal.SIGINT, stop)
(folder / "environment.json").write_text(json.dumps(dict(os.environ)))
if behaviour == "fail": sys.exit("it broke")
if behaviour == "ignore": signal.signal(signal.SIGINT, signal.SIG_IGN); behaviour = "wait"
if behaviour == "wait":
    (folder / "ready").touch(); time.sleep(60)
(folder / "model.safetensors").touch()
(folder / "summary.json").write_text(text)
"""


class ScriptRunner(Runner):
    """Run a script instead of training. It finishes unless told to "fail", "wait" for a signal or "ignore" it."""

    behaviours: dict[str, str] = {}  # noqa: RUF012

    def command(self, run: PlannedRun) -> list[str]:
        folder, behaviour = self.output / run.name, self.behaviours.get(run.name, "finish")
        return [sys.executable, "-c", SCRIPT, str(folder), json.dumps(fake_summary(run)), behaviour]


@pytest.fixture
def runs() -> list[PlannedRun]:
    return load_experiment("mask-optimizer", Selection(columns=("Eq. 16",))).runs


def script_runner(folder: Path, behaviours: dict[str, str] | None = None, **options) -> tuple[ScriptRunner, Path]:
    output = folder / "output.txt"
    folder.mkdir(exist_ok=True)
    runner = ScriptRunner(folder / "runs", console=Console(file=output.open("a"), width=500), device="cpu", **options)
    runner.behaviours = behaviours or {}
    return runner, output


def test_every_run_is_run_once_and_recorded_once(tmp_path, runs):
    file = tmp_path / "results" / "a.jsonl"
    runner, output = script_runner(tmp_path, jobs=3, record_file=file)
    assert runner.run(runs) == 0 and len(read_records(file)) == len(runs) == 4
    (tmp_path / "runs" / runs[0].name / "summary.json").unlink()  # it is still in the record
    runner, output = script_runner(tmp_path, jobs=3, record_file=file)
    assert runner.run(runs) == 0
    assert {(tmp_path / "runs" / run.name / "started").read_text() for run in runs} == {"once"}
    assert len(read_records(file)) == 4 and "4 runs, 4 finished before" in output.read_text()


def test_a_run_that_another_command_recorded_meanwhile_is_not_run(tmp_path, runs):
    file = tmp_path / "results" / "a.jsonl"
    runner, output = script_runner(tmp_path, jobs=1, record_file=file)
    append_record(file.with_name("b.jsonl"), fake_summary(runs[2], accuracy=0.5))
    assert runner.run(runs) == 0 and f"3/4 {runs[2].name}: recorded by another command" in output.read_text()
    assert not (tmp_path / "runs" / runs[2].name).exists() and len(read_records(file)) == 3


def test_a_record_that_cannot_be_written_does_not_stop_the_runs(tmp_path, runs, monkeypatch):
    def disk_full(path, summary):
        raise OSError("no space left on device")

    file = tmp_path / "results" / "a.jsonl"
    runner, output = script_runner(tmp_path, jobs=2, record_file=file)
    with monkeypatch.context() as patched:
        patched.setattr(records, "append_record", disk_full)
        assert runner.run(runs) == 1 and runner.done == 4
    assert "not recorded: no space left on device; fix this and run the same command again" in output.read_text()
    runner, output = script_runner(tmp_path, jobs=2, record_file=file)
    assert runner.run(runs) == 0 and len(read_records(file)) == 4


def test_a_record_damaged_meanwhile_does_not_stop_the_runs(tmp_path, runs):
    runner, output = script_runner(tmp_path, jobs=2, record_file=tmp_path / "a.jsonl")
    (tmp_path / "a.jsonl").write_text("{}}\n")
    assert runner.run(runs) == 1 and runner.done == 4
    assert "a.jsonl, line 1, is not JSON" in output.read_text()


def test_no_process_is_left_running_after_an_error(tmp_path, runs, monkeypatch):
    runner, _ = script_runner(tmp_path, {runs[1].name: "wait"}, jobs=2)

    def fail_when_ready(run, *_):
        while not (tmp_path / "runs" / runs[1].name / "ready").exists():
            time.sleep(0.01)
        raise MemoryError

    monkeypatch.setattr(runner, "ended", fail_when_ready)
    with pytest.raises(MemoryError):
        runner.run(runs[:2])
    [job] = runner.running
    assert job.process.wait(timeout=20) == 130


def test_a_damaged_summary_is_a_failure(tmp_path, runs, monkeypatch):
    runner, output = script_runner(tmp_path, jobs=1)
    monkeypatch.setattr(runner, "command", lambda run: [sys.executable, "-c", SCRIPT, str(runner.output / run.name), "{", ""])
    assert runner.run(runs[:1]) == 1 and "its summary.json is damaged" in output.read_text()


def test_a_failed_run_is_reported_with_its_log_while_the_others_continue(tmp_path, runs):
    runner, output = script_runner(tmp_path, {runs[1].name: "fail"}, jobs=2)
    assert runner.run(runs) == 1
    assert sum((tmp_path / "runs" / run.name / "summary.json").exists() for run in runs) == 3
    log = tmp_path / "runs" / "logs" / f"{runs[1].name}.log"
    assert f"failed with exit status 1: {runs[1].name}: it broke; see {log}" in output.read_text()
    assert "it broke" in log.read_text()


def test_a_summary_of_another_run_is_a_failure(tmp_path, runs):
    class WrongSummary(ScriptRunner):
        def command(self, run: PlannedRun) -> list[str]:
            wrong = json.dumps(fake_summary(run, method="gmp", options={}))
            return [sys.executable, "-c", SCRIPT, str(self.output / run.name), wrong, "finish"]

    runner = WrongSummary(tmp_path / "runs", console=Console(file=(tmp_path / "output").open("w")), device="cpu")
    assert runner.run(runs[:1]) == 1 and not runner.history.summaries


def when_ready(folder: Path, count: int, act) -> threading.Thread:
    def wait() -> None:
        until = time.monotonic() + 60
        while len(list(folder.glob("*/ready"))) < count and time.monotonic() < until:
            time.sleep(0.02)
        act()

    thread = threading.Thread(target=wait)
    thread.start()
    return thread


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_a_signal_is_forwarded_and_the_same_command_continues(tmp_path, runs, number):
    handler = signal.getsignal(number)
    runner, output = script_runner(tmp_path, {run.name: "wait" for run in runs}, jobs=2)
    thread = when_ready(tmp_path / "runs", 2, lambda: os.kill(os.getpid(), number))
    assert runner.run(runs) == 128 + number
    thread.join()
    logs = [path.read_text() for path in (tmp_path / "runs" / "logs").glob("*.log")]
    assert len(logs) == 2 and all(log.endswith("saved\n") for log in logs)  # two were running, and no third was started
    assert "run the same command again to continue" in output.read_text() and not runner.failed
    assert signal.getsignal(number) is handler
    runner, output = script_runner(tmp_path, jobs=2)
    assert runner.run(runs) == 0
    starts = sorted((tmp_path / "runs" / run.name / "started").read_text() for run in runs)
    assert starts == ["once", "once", "onceagain", "onceagain"]


def test_a_third_signal_kills_a_run_that_ignores_signals(tmp_path, runs):
    runner, _ = script_runner(tmp_path, {runs[0].name: "ignore"}, jobs=1)

    def interrupt_three_times() -> None:
        for _ in range(3):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.3)

    thread, started = when_ready(tmp_path / "runs", 1, interrupt_three_times), time.monotonic()
    assert runner.run(runs) == 130 and time.monotonic() - started < 50  # without the kill it would take 60 s
    thread.join()


@pytest.mark.parametrize("finishes", [True, False])
def test_the_runner_waits_for_a_run_in_another_process(tmp_path, runs, finishes):
    folder = tmp_path / "runs" / runs[0].name
    folder.mkdir(parents=True)
    with RunFolder(folder).locked():
        runner, output = script_runner(tmp_path, jobs=1)
        thread = threading.Thread(target=lambda: statuses.append(runner.run_in_processes()))
        statuses: list[None] = []
        runner.waiting, runner.total = runs[:2], 2
        thread.start()
        while not (tmp_path / "runs" / runs[1].name / "summary.json").exists():
            time.sleep(0.02)
        if finishes:
            (folder / "model.safetensors").touch()
            (folder / "summary.json").write_text(json.dumps(fake_summary(runs[0])))
    thread.join(60)
    assert runner.done == 2 and not runner.failed and (folder / "started").exists() != finishes
    assert f"another process is training {runs[0].name}" in output.read_text()


def test_a_run_that_another_process_started_at_the_same_moment_has_not_failed(tmp_path, runs):
    folder = tmp_path / "runs" / runs[0].name
    runner, _ = script_runner(tmp_path)
    with RunFolder(folder).locked():
        runner.ended(runs[0], 2, 1.0)
    assert runner.waiting == runs[:1] and not runner.failed and runner.elsewhere == {runs[0].name}


def test_the_time_limit_stops_the_runs(tmp_path, runs):
    runner, output = script_runner(tmp_path, {run.name: "wait" for run in runs}, jobs=1, minutes=0.02)
    started = time.monotonic()
    assert runner.run(runs) == 130 and time.monotonic() - started < 30
    assert "time is up" in output.read_text()
