"""Runs side by side. Where the runner itself is at issue, its processes are short scripts in place of `optg train`."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from rich.console import Console

from optg.experiments import record
from optg.experiments.command import Reproduce, reproduce
from optg.experiments.declaration import Choice, Run, load
from optg.experiments.runner import Runner, multi_process_service
from optg.training.folder import RunFolder
from tests.experiments.known import summary

SCRIPT = """
import json, os, signal, sys, time
from pathlib import Path
folder, text, wish = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
folder.mkdir(parents=True, exist_ok=True)
(folder / "started").write_text((folder / "started").read_text() + "again" if (folder / "started").exists() else "once")
def stop(number, frame):
    print("saved"); sys.exit(130)
signal.signal(signal.SIGINT, stop)
(folder / "environment.json").write_text(json.dumps(dict(os.environ)))
if wish == "fail": sys.exit("it broke")
if wish == "deaf": signal.signal(signal.SIGINT, signal.SIG_IGN); wish = "wait"
if wish == "wait":
    (folder / "ready").touch(); time.sleep(60)
(folder / "model.safetensors").touch()
(folder / "summary.json").write_text(text)
"""


class Scripts(Runner):
    """What a run does instead of training: nothing, fail, or wait for a signal."""

    wishes: dict[str, str] = {}  # noqa: RUF012

    def command(self, run: Run) -> list[str]:
        folder, wish = self.output / run.name, self.wishes.get(run.name, "nothing")
        return [sys.executable, "-c", SCRIPT, str(folder), json.dumps(summary(run)), wish]


@pytest.fixture
def runs() -> list[Run]:
    return load("mask-optimizer", Choice(columns=("Eq. 16",))).runs


def scripts(folder: Path, wishes: dict[str, str] | None = None, **options) -> tuple[Scripts, Path]:
    said = folder / "said.txt"
    folder.mkdir(exist_ok=True)
    runner = Scripts(folder / "runs", console=Console(file=said.open("a"), width=500), device="cpu", **options)
    runner.wishes = wishes or {}
    return runner, said


def test_each_runs_once_and_is_recorded_once(tmp_path, runs):
    file = tmp_path / "results" / "a.jsonl"
    runner, said = scripts(tmp_path, jobs=3, record_file=file)
    assert runner.run(runs) == 0 and len(record.read(file)) == len(runs) == 4
    (tmp_path / "runs" / runs[0].name / "summary.json").unlink()  # the record has it still
    runner, said = scripts(tmp_path, jobs=3, record_file=file)
    assert runner.run(runs) == 0
    assert {(tmp_path / "runs" / run.name / "started").read_text() for run in runs} == {"once"}
    assert len(record.read(file)) == 4 and "4 runs, 4 done before" in said.read_text()


def test_what_another_command_has_recorded_since_is_not_run(tmp_path, runs):
    file = tmp_path / "results" / "a.jsonl"
    runner, said = scripts(tmp_path, jobs=1, record_file=file)
    record.append(file.with_name("b.jsonl"), summary(runs[2], accuracy=0.5))
    assert runner.run(runs) == 0 and f"3/4 {runs[2].name}: recorded by another command" in said.read_text()
    assert not (tmp_path / "runs" / runs[2].name).exists() and len(record.read(file)) == 3


def test_a_record_that_cannot_be_written_stops_no_run(tmp_path, runs, monkeypatch):
    def full(path, summary):
        raise OSError("no space left on device")

    file = tmp_path / "results" / "a.jsonl"
    runner, said = scripts(tmp_path, jobs=2, record_file=file)
    with monkeypatch.context() as patched:
        patched.setattr(record, "append", full)
        assert runner.run(runs) == 1 and runner.done == 4
    assert "not recorded: no space left on device; the same command will" in said.read_text()
    runner, said = scripts(tmp_path, jobs=2, record_file=file)
    assert runner.run(runs) == 0 and len(record.read(file)) == 4


def test_a_record_that_was_damaged_since_stops_no_run(tmp_path, runs):
    runner, said = scripts(tmp_path, jobs=2, record_file=tmp_path / "a.jsonl")
    (tmp_path / "a.jsonl").write_text("{}}\n")
    assert runner.run(runs) == 1 and runner.done == 4
    assert "a.jsonl, line 1, is not JSON" in said.read_text()


def test_no_run_is_left_behind(tmp_path, runs, monkeypatch):
    runner, _ = scripts(tmp_path, {runs[1].name: "wait"}, jobs=2)

    def broken(run, *_):
        while not (tmp_path / "runs" / runs[1].name / "ready").exists():
            time.sleep(0.01)
        raise MemoryError

    monkeypatch.setattr(runner, "ended", broken)
    with pytest.raises(MemoryError):
        runner.run(runs[:2])
    [job] = runner.running
    assert job.process.wait(timeout=20) == 130


def test_a_damaged_summary_is_a_failure(tmp_path, runs, monkeypatch):
    runner, said = scripts(tmp_path, jobs=1)
    monkeypatch.setattr(runner, "command", lambda run: [sys.executable, "-c", SCRIPT, str(runner.output / run.name), "{", ""])
    assert runner.run(runs[:1]) == 1 and "its summary.json is damaged" in said.read_text()


def test_what_fails_is_named_with_its_log_while_the_others_go_on(tmp_path, runs):
    runner, said = scripts(tmp_path, {runs[1].name: "fail"}, jobs=2)
    assert runner.run(runs) == 1
    assert sum((tmp_path / "runs" / run.name / "summary.json").exists() for run in runs) == 3
    log = tmp_path / "runs" / "logs" / f"{runs[1].name}.log"
    assert f"failed with exit status 1: {runs[1].name}: it broke; see {log}" in said.read_text()
    assert "it broke" in log.read_text()


def test_a_summary_of_another_run_is_no_success(tmp_path, runs):
    class Wrong(Scripts):
        def command(self, run: Run) -> list[str]:
            wrong = json.dumps(summary(run, method="gmp", options={}))
            return [sys.executable, "-c", SCRIPT, str(self.output / run.name), wrong, "nothing"]

    runner = Wrong(tmp_path / "runs", console=Console(file=(tmp_path / "said").open("w")), device="cpu")
    assert runner.run(runs[:1]) == 1 and not runner.known


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
def test_a_signal_is_passed_on_and_the_same_command_goes_on(tmp_path, runs, number):
    handler = signal.getsignal(number)
    runner, said = scripts(tmp_path, {run.name: "wait" for run in runs}, jobs=2)
    thread = when_ready(tmp_path / "runs", 2, lambda: os.kill(os.getpid(), number))
    assert runner.run(runs) == 128 + number
    thread.join()
    logs = [path.read_text() for path in (tmp_path / "runs" / "logs").glob("*.log")]
    assert len(logs) == 2 and all(log.endswith("saved\n") for log in logs)  # two had begun, and no third was started
    assert "the same command goes on" in said.read_text() and not runner.failed
    assert signal.getsignal(number) is handler
    runner, said = scripts(tmp_path, jobs=2)
    assert runner.run(runs) == 0
    begun = sorted((tmp_path / "runs" / run.name / "started").read_text() for run in runs)
    assert begun == ["once", "once", "onceagain", "onceagain"]


def test_a_third_signal_kills_what_does_not_listen(tmp_path, runs):
    runner, _ = scripts(tmp_path, {runs[0].name: "deaf"}, jobs=1)

    def thrice() -> None:
        for _ in range(3):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.3)

    thread, started = when_ready(tmp_path / "runs", 1, thrice), time.monotonic()
    assert runner.run(runs) == 130 and time.monotonic() - started < 50  # it would wait for 60 s
    thread.join()


@pytest.mark.parametrize("finishes", [True, False])
def test_what_another_process_trains_is_waited_for(tmp_path, runs, finishes):
    folder = tmp_path / "runs" / runs[0].name
    folder.mkdir(parents=True)
    with RunFolder(folder).locked():
        runner, said = scripts(tmp_path, jobs=1)
        thread = threading.Thread(target=lambda: statuses.append(runner.run_beside()))
        statuses: list[None] = []
        runner.waiting, runner.total = runs[:2], 2
        thread.start()
        while not (tmp_path / "runs" / runs[1].name / "summary.json").exists():
            time.sleep(0.02)
        if finishes:
            (folder / "model.safetensors").touch()
            (folder / "summary.json").write_text(json.dumps(summary(runs[0])))
    thread.join(60)
    assert runner.done == 2 and not runner.failed and (folder / "started").exists() != finishes
    assert f"another process trains {runs[0].name}" in said.read_text()


def test_a_run_that_another_process_began_in_the_same_moment_has_not_failed(tmp_path, runs):
    folder = tmp_path / "runs" / runs[0].name
    runner, _ = scripts(tmp_path)
    with RunFolder(folder).locked():
        runner.ended(runs[0], 2, 1.0)
    assert runner.waiting == runs[:1] and not runner.failed and runner.elsewhere == {runs[0].name}


def test_time_may_be_limited_in_this_process_too(tmp_path):
    options = Reproduce(("cifar",), epochs=500, minutes=0.05, only=("gmp", "optg"), columns=("95",), output=tmp_path, **SMALL)
    started = time.monotonic()
    assert reproduce(options) == 130 and time.monotonic() - started < 60
    assert signal.getitimer(signal.ITIMER_REAL)[0] == 0


def test_time_may_be_limited(tmp_path, runs):
    runner, said = scripts(tmp_path, {run.name: "wait" for run in runs}, jobs=1, minutes=0.02)
    started = time.monotonic()
    assert runner.run(runs) == 130 and time.monotonic() - started < 30
    assert "time is up" in said.read_text()


def test_gpus_are_used_in_turn_and_cores_are_shared(tmp_path, runs, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    runner = Runner(tmp_path, jobs=4, device="cuda")
    assert [runner.environment(slot)["CUDA_VISIBLE_DEVICES"] for slot in range(4)] == ["3", "5", "3", "5"]
    assert int(runner.environment(0)["OMP_NUM_THREADS"]) == max(1, len(os.sched_getaffinity(0)) // 4)


def test_mps_is_started_for_the_runs_and_ended_after_them(tmp_path, monkeypatch):
    control = tmp_path / "nvidia-cuda-mps-control"
    calls = tmp_path / "calls"
    control.write_text(
        f'#!/bin/sh\nif [ "$1" = -d ]; then echo "start $CUDA_MPS_PIPE_DIRECTORY" >> {calls}; touch {tmp_path}/up; exit 0; fi\n'
        f'read line; echo "$line" >> {calls}; test -e {tmp_path}/up\n'
    )
    control.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with multi_process_service(True):
        folder = os.environ["CUDA_MPS_PIPE_DIRECTORY"]
        assert os.environ["CUDA_MPS_LOG_DIRECTORY"] == folder and Path(folder).is_dir()
        with multi_process_service(True):  # it is used, not started again
            pass
    assert calls.read_text().splitlines() == ["get_server_list", f"start {folder}", "get_server_list", "quit"]
    assert "CUDA_MPS_PIPE_DIRECTORY" not in os.environ


def test_no_mps_is_one_line(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ValueError, match="--mps needs nvidia-cuda-mps-control"), multi_process_service(True):
        pass


SMALL = {"model": "digits", "data": "synthetic:1x8x8:10:256", "set": ("batch_size=64",), "device": "cpu", "jobs": 0}


def test_the_whole_of_tab_1_in_one_epoch(tmp_path, capsys):
    """The machinery of `optg reproduce cifar` on a small model: every method trains, is recorded and stands in the table."""
    options = Reproduce(("cifar",), epochs=1, output=tmp_path / "runs", record=tmp_path / "a.jsonl", **SMALL)
    assert reproduce(options) == 0
    said = capsys.readouterr().out
    summaries = record.read(tmp_path / "a.jsonl")
    methods = {"dense", "set", "snip", "grasp", "synflow", "str", "rigl", "gmp", "granet", "optg"}
    assert {s["method"] for s in summaries} == methods
    assert len(summaries) == 25  # grasp sees more batches of CIFAR-100, str has other decays
    sparse = [s for s in summaries if s["method"] not in ("dense", "str")]
    assert all(abs(s["sparsity"] - s["settings"]["sparsity"]) < 1e-4 for s in sparse)
    assert {s["command"].split()[1] for s in summaries} == {"train"}
    optg = next(s for s in summaries if s["method"] == "optg")
    assert f"{100 * optg['accuracy']:.2f}" in said and "Tab. 1" in said and "batch size" in said
    assert reproduce(options) == 0 and "25 runs, 25 done before" in capsys.readouterr().out
    options.table = True
    assert reproduce(options) == 0 and "done before" not in capsys.readouterr().out


def test_several_experiments_share_their_runs_and_jobs(tmp_path, capsys):
    names = ("budgets", "alpha", "schedules", "budgets")
    with pytest.raises(ValueError, match="schedules is drawn"):
        reproduce(Reproduce(names, epochs=80, output=tmp_path, **SMALL))
    options = Reproduce(names[:2], output=tmp_path, **{**SMALL, "data": "synthetic:1x8x8:10:64"})
    assert reproduce(options) == 0
    said = capsys.readouterr().out
    assert "6 runs, 0 done before" in said  # 4 + 3, and OptG with its own α is in both
    assert said.index("Tab. A3") < said.index("Tab. A4")
    assert reproduce(Reproduce(("alpha", "schedules", "alpha"), output=tmp_path, table=True)) == 0
    said = capsys.readouterr().out
    assert said.count("Tab. A4") == 1 and "schedules.png" in said


def test_a_signal_before_a_run_trains_stops_it_at_once(tmp_path, monkeypatch, capsys):
    """In this process: a run that is being set up has nothing to save."""
    from optg.training import run

    def signalled(*args):
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(run, "set_up", signalled)
    assert reproduce(Reproduce(("alpha",), output=tmp_path, **SMALL)) == 130
    assert "stopped with 0 of 3 runs done; the same command goes on from there" in capsys.readouterr().out


def test_masks_are_trained_on_the_weights_of_a_trained_model(tmp_path):
    from safetensors.torch import load_file

    choice = {"epochs": 2, "output": tmp_path / "runs", "sparsity": (0.9,), "only": ("trained weights",)}
    assert reproduce(Reproduce(("supermasks",), **choice, **SMALL)) == 0
    dense, trained = sorted((tmp_path / "runs").glob("*seed0"), key=lambda path: "trained" in path.name)
    before, after = load_file(dense / "model.safetensors"), load_file(trained / "model.safetensors")
    name = "4.weight"
    assert before[name].ndim == 4
    layer = after[name]
    kept = layer != 0
    assert 0.05 < kept.float().mean() < 0.2 and layer[kept].equal(before[name][kept])


def test_a_model_that_others_need_is_trained_again_and_its_record_stands(tmp_path):
    choice = {"epochs": 1, "sparsity": (0.9,), **SMALL}
    first, second = tmp_path / "results" / "a.jsonl", tmp_path / "results" / "b.jsonl"
    assert reproduce(Reproduce(("supermasks",), only=("dense",), output=tmp_path / "one", record=first, **choice)) == 0
    [line] = record.read(first)
    first.write_text(json.dumps({**line, "accuracy": 0.123}) + "\n")
    only = ("trained weights", "dense")
    assert reproduce(Reproduce(("supermasks",), only=only, output=tmp_path / "two", record=second, **choice)) == 0
    assert [path.parent.name.split("-")[2] for path in (tmp_path / "two").glob("*/model.safetensors")].count("dense") == 1
    assert [row["method"] for row in record.read(second)] == ["supermask"]
    known = record.known(tmp_path / "two", record.beside(second)).values()
    assert [row["accuracy"] for row in known if row["method"] == "dense"] == [0.123]


def test_what_cannot_run_fails_with_its_reason(tmp_path, capsys):
    options = Reproduce(("dormant-decay",), output=tmp_path / "runs", **{**SMALL, "data": "synthetic:nonsense"})
    assert reproduce(options) == 1
    assert "unknown dataset 'synthetic:nonsense'" in capsys.readouterr().out


def test_the_command_line(tmp_path):
    """One run in a process of its own, and what is wrong in one line."""
    command = [
        sys.executable,
        "-m",
        "optg",
        "reproduce",
        "budgets",
        "--only",
        "ERK",
        "--epochs",
        "2",
        "--output",
        str(tmp_path),
    ]
    small = ["--model", "digits", "--data", "synthetic:1x8x8:10:64", "--set", "batch_size=32", "precision=float32"]
    done = subprocess.run([*command, *small, "--device", "cpu"], capture_output=True, text=True)
    assert done.returncode == 0 and "1/1" in done.stdout and "ERK" in done.stdout, done.stdout + done.stderr
    wrong = subprocess.run([*command, "--set", "lr"], capture_output=True, text=True)
    assert (
        wrong.returncode == 2 and wrong.stderr == "optg: --set 'lr'; expected a setting and its value, such as batch_size=256\n"
    )
