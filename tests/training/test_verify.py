import errno
import os
import shutil
import time
from pathlib import Path

import pytest

from optg.training.manifest import Manifest
from optg.training.verify import verify
from tests.cli.calling import call
from tests.report.fake_runs import make_old
from tests.training.runs import start


@pytest.fixture
def run(undisturbed, tmp_path) -> Path:
    """A copy of a finished run, to be damaged."""
    return shutil.copytree(undisturbed, tmp_path / "run")


def states(run: Path) -> dict[str, str]:
    return {finding.name: finding.state for finding in verify(run).findings}


def flip(path: Path, position: int) -> None:
    content = bytearray(path.read_bytes())
    content[position] ^= 1 << position % 8
    path.write_bytes(content)


def listed_files(run: Path) -> list[Path]:
    return sorted(path for path in run.rglob("*") if path.is_file() and path.name != ".lock")


def test_a_finished_run_is_whole(run):
    assert set(states(run).values()) == {"whole"} and len(states(run)) == 7 and verify(run).is_fine
    assert next(verify(run).lines()) == f"{run}: nothing is damaged"


def test_a_bit_flip_in_every_256th_byte_of_every_file_is_found(run):
    """The campaign flips every 64th."""
    names = states(run)
    for path in listed_files(run):
        name = str(path.relative_to(run))
        name = name if name in names else str(path.parent.relative_to(run))
        for position in range(0, path.stat().st_size, 256):
            flip(path, position)
            verdict = verify(run)
            assert {f.name: f.state for f in verdict.findings}[name] == "damaged" and not verdict.is_fine, (path, position)
            flip(path, position)
    assert verify(run).is_fine


def test_every_missing_file_is_found(run):
    for path in listed_files(run):
        hidden = path.rename(run.parent / "hidden")
        verdict = verify(run)
        assert not verdict.is_fine and any(finding.state in ("missing", "damaged") for finding in verdict.findings), path
        hidden.rename(path)


def test_verify_changes_nothing_and_says_what_is_recoverable(run):
    flip(run / "model.safetensors", 500)
    flip(run / "metrics.jsonl", 20)
    newest = max((run / "checkpoints").glob("step-*"))
    other = min((run / "checkpoints").glob("step-*"))
    flip(newest / "tensors.safetensors", 500)
    before = {path: path.read_bytes() for path in listed_files(run)}
    text = "\n".join(verify(run).lines())
    assert f"recoverable: model.safetensors; give the run's training command again: it continues from {other.name}" in text
    assert "not recoverable: the lost rows of metrics.jsonl; the model does not depend on them" in text
    assert f"not recoverable: checkpoints/{newest.name}; training continues from {other.name}" in text
    assert before == {path: path.read_bytes() for path in listed_files(run)}
    flip(other / "tensors.safetensors", 500)
    assert "not recoverable: model.safetensors; no checkpoint is whole. To go on, train again with --fresh" in "\n".join(
        verify(run).lines()
    )


def test_advice_for_a_finished_run_asks_for_nothing_that_it_does_not_need(run):
    for path in (run / "checkpoints").glob("step-*"):
        flip(path / "tensors.safetensors", 500)
    text = "\n".join(verify(run).lines())
    assert "the run has finished and does not need it" in text and "--fresh" not in text


def test_names_of_leftovers_are_leftovers_only_if_training_deletes_them(run):
    (run / "checkpoints" / ".partial-7").write_text("a file")
    (run / "checkpoints" / ".partial-8").mkdir()
    (run / "checkpoints" / ".partial-8" / "thesis.txt").touch()
    (run / ".summary.json.123.partial").symlink_to("elsewhere")
    found = states(run)
    for name in ("checkpoints/.partial-7", "checkpoints/.partial-8", ".summary.json.123.partial"):
        assert found[name] == "unverifiable"


def test_a_run_of_an_older_version_is_unverifiable_but_not_damaged(run):
    found = states(make_old(run))
    assert verify(run).is_fine and found["model.safetensors"] == found["metrics.jsonl"] == "unverifiable"
    assert {state for name, state in found.items() if name.startswith("checkpoints/")} == {"whole"}


def test_an_interrupted_run_is_unfinished(run):
    manifest = Manifest.read(run)
    Manifest({"recipe.toml": manifest.files["recipe.toml"]}).write(run)
    found = states(run)
    assert verify(run).is_fine and found["model.safetensors"] == "unverifiable" and found["recipe.toml"] == "whole"
    (run / "model.safetensors").unlink()
    assert states(run)["model.safetensors"] == "unfinished"


def test_other_files_are_named(run, monkeypatch):
    call(monkeypatch, "export", run)
    for name in ("notes.txt", "metrics.jsonl.damaged", ".summary.json.123.partial"):
        (run / name).touch()
    (run / "checkpoints" / ".partial-12").mkdir()
    (run / "previous-1").mkdir()

    def refuse(path: Path) -> None:
        raise ValueError(f"{path}: nothing in it")

    found = states(run)
    assert [found[n] for n in ("notes.txt", "metrics.jsonl.damaged", ".summary.json.123.partial", "previous-1")] == [
        "unverifiable", "set aside", "leftover", "set aside",
    ]  # fmt: skip
    assert found["model.optg"] == "unverifiable" and found["checkpoints/.partial-12"] == "leftover" and verify(run).is_fine
    assert not verify(run, refuse).is_fine


def test_only_regular_packed_files_are_opened(run):
    os.mkfifo(run / "fifo.optg")
    (run / "link.optg").symlink_to("/dev/zero")
    (run / "folder.optg").mkdir()
    opened = []
    found = {finding.name: finding.state for finding in verify(run, opened.append).findings}
    assert not opened and {found[f"{name}.optg"] for name in ("fifo", "link", "folder")} == {"unverifiable"}


def test_a_folder_that_is_no_run_is_refused(tmp_path):
    with pytest.raises(ValueError, match="is not the folder of a run"):
        verify(tmp_path)


def test_a_run_that_is_training_is_not_damaged(tmp_path):
    process = start(tmp_path / "run", "--epochs", "300")
    while process.poll() is None and not (tmp_path / "run" / "metrics.jsonl").exists():
        time.sleep(0.005)
    verdicts = [verify(tmp_path / "run") for _ in range(20)]
    process.kill()
    process.communicate()
    assert all(verdict.is_fine for verdict in verdicts), [list(v.lines()) for v in verdicts if not v.is_fine][:1]
    assert any(finding.detail == "a process is training here" for finding in verdicts[0].findings)


def test_a_run_on_a_disk_that_can_only_be_read_is_verified(run, monkeypatch):
    real = os.open

    def read_only(path, flags, *rest, **named):
        if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), path)
        return real(path, flags, *rest, **named)

    monkeypatch.setattr(os, "open", read_only)
    assert verify(run).is_fine
