"""Kills and errors at every file-system call of a run: nothing is lost, `train` continues and `verify` finds no damage."""

import errno
import json
import os
import shutil
from pathlib import Path

import pytest

from optg.files import fingerprint
from optg.training.verify import WRONG, verify
from tests.cli.calling import call
from tests.report.fake_runs import make_old
from tests.training.faults import KILLED, Fault, run
from tests.training.runs import USER_CODE

SETTINGS = (*USER_CODE, "--epochs", "2", "--batch-size", "160", "--sparsity", "0.5", "--device", "cpu")
TRAIN = ("train", *SETTINGS, "--keep", "1", "--minutes", "0.0001")  # a checkpoint at every step, and only one is kept


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """A finished run. It is trained in this process, so that children need not import anything."""
    folder = tmp_path_factory.mktemp("runs") / "whole"
    with pytest.MonkeyPatch.context() as patch:
        call(patch, *TRAIN, "--output", folder)
    return folder


@pytest.fixture(scope="module")
def stopped(whole, tmp_path_factory) -> Path:
    """A run that was killed after its first epoch, with a row after its checkpoint."""
    folder = tmp_path_factory.mktemp("runs") / "stopped"
    rows = 0
    for at in range(200):
        shutil.rmtree(folder, ignore_errors=True)
        run(*TRAIN, "--output", folder, fault=Fault(folder, at))
        rows = len((folder / "metrics.jsonl").read_bytes().splitlines()) if (folder / "metrics.jsonl").exists() else 0
        if rows == 1 and list((folder / "checkpoints").glob("step-*")):
            return folder
    raise AssertionError("no kill left a row")


def new(folder: Path, whole: Path) -> None:
    pass


def unfinished(folder: Path, whole: Path) -> None:
    shutil.copytree(whole, folder)
    (folder / "summary.json").unlink()


def damaged(folder: Path, whole: Path) -> None:
    shutil.copytree(whole, folder)
    content = bytearray((folder / "model.safetensors").read_bytes())
    content[-1] ^= 1
    (folder / "model.safetensors").write_bytes(content)


def old(folder: Path, whole: Path) -> None:
    unfinished(folder, whole)
    make_old(folder)


def contents(folder: Path) -> set[str]:
    """Return the hashes of all files in a folder."""
    return {fingerprint(path).sha256 for path in folder.rglob("*") if path.is_file() and path.name != ".lock"}


def wrong_files(folder: Path) -> set[str]:
    """Return the names that `verify` finds damaged or missing."""
    if not any((folder / name).exists() for name in ("recipe.toml", "manifest.json", "checkpoints", "metrics.jsonl")):
        return set()  # there is no run yet
    return {finding.name for finding in verify(folder).findings if finding.state in WRONG}


def finish(folder: Path, whole: Path) -> None:
    """Continue the run, and check that it ends like the undisturbed one."""
    status, output = run(*TRAIN, "--output", folder)
    assert status == 0, output
    assert (folder / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()
    results = [json.loads((f / "summary.json").read_text())["accuracy"] for f in (folder, whole)]
    assert results[0] == results[1]
    assert verify(folder).is_fine, list(verify(folder).lines())
    assert [json.loads(line)["epoch"] for line in (folder / "metrics.jsonl").read_text().splitlines()] == [1, 2]


@pytest.mark.parametrize(
    "prepare", [new, *(pytest.param(state, marks=pytest.mark.long) for state in (unfinished, damaged, old))]
)
def test_a_kill_at_any_call_leaves_a_run_that_continues(whole, tmp_path, prepare):
    status, calls = KILLED, 0
    while status == KILLED:
        folder = tmp_path / str(calls)
        prepare(folder, whole)
        model = contents(folder) if prepare is damaged else set()
        wrong = wrong_files(folder)
        status, output = run(*TRAIN, "--output", folder, fault=Fault(folder, calls))
        assert status in (KILLED, 0), output
        assert wrong_files(folder) <= wrong  # the kill damaged nothing
        finish(folder, whole)
        assert not model - contents(folder) - contents(whole)  # the damaged model is kept
        shutil.rmtree(folder)
        calls += 1
    assert calls > (40 if prepare is new else 15)


def test_a_kill_at_any_call_of_a_fresh_start_loses_nothing(whole, tmp_path):
    status, calls, before = KILLED, 0, contents(whole)
    while status == KILLED:
        folder = tmp_path / str(calls)
        shutil.copytree(whole, folder)
        status, output = run(*TRAIN, "--fresh", "--output", folder, fault=Fault(folder, calls))
        assert status in (KILLED, 0) and before <= contents(folder), output
        assert not wrong_files(folder)
        status_again, output = run(*TRAIN, "--fresh", "--output", folder)
        assert status_again == 0, output
        assert before <= contents(folder) and verify(folder).is_fine
        shutil.rmtree(folder)
        calls += 1
    assert calls > 30


CODES = [errno.EIO, *(pytest.param(code, marks=pytest.mark.long) for code in (errno.EMFILE, errno.EACCES, errno.ENOSPC))]


@pytest.mark.parametrize("code", CODES)
def test_an_error_at_any_call_stops_with_one_line_and_loses_nothing(whole, stopped, tmp_path, code):
    happened, calls = True, 0
    while happened:
        folder = tmp_path / str(calls)
        shutil.copytree(stopped, folder)
        fault = Fault(folder, calls, OSError(code, os.strerror(code)))
        status, output = run(*TRAIN, "--output", folder, fault=fault)
        happened = bool(fault.happened[0])
        last = output.splitlines()[-1]
        if status:
            assert status == 2 and last.startswith("optg: ") and os.strerror(code) in last and "Traceback" not in output, output
            assert "damaged" not in output
        assert not wrong_files(folder) and not list(folder.rglob("*.damaged*"))
        assert list((folder / "checkpoints").glob("step-*"))
        finish(folder, whole)
        shutil.rmtree(folder)
        calls += 1
    assert calls > 40


@pytest.mark.parametrize("code", CODES[:3])
@pytest.mark.parametrize("command", ["evaluate", "export", "report", "verify"])
def test_a_read_error_is_named_and_is_no_damage(whole, tmp_path, command, code):
    folder, happened, calls = tmp_path / "run", True, 0
    shutil.copytree(whole, folder)
    before = contents(folder)
    output = ("--output", tmp_path / "out") if command in ("export", "report") else ()
    while happened:
        fault = Fault(folder, calls, OSError(code, os.strerror(code)))
        status, text = run(command, folder, *output, fault=fault)
        happened = bool(fault.happened[0])
        if status:
            last = text.splitlines()[-1]
            assert status == 2 and os.strerror(code) in last and "damaged" not in text and "Traceback" not in text, text
        assert contents(folder) == before
        calls += 1
    assert calls > 2
