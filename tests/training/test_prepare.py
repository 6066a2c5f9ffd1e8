"""What training does with a folder that holds something already."""

import json
import os
import shutil
from pathlib import Path

import pytest

from optg.training import run as runs
from optg.training.verify import verify
from tests.cli.calling import call, refusal
from tests.report.fake_runs import make_old
from tests.training import faults
from tests.training.runs import SMALL

TRAIN = ("train", *SMALL)


@pytest.fixture
def run(undisturbed, tmp_path) -> Path:
    """A copy of a finished run, to be damaged."""
    return shutil.copytree(undisturbed, tmp_path / "run")


def flip(path: Path, position: int = -1) -> bytes:
    """Change one bit. Return the damaged content."""
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(content)
    return bytes(content)


def checkpoints(run: Path) -> list[Path]:
    return sorted((run / "checkpoints").glob("step-?????????"))


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def accuracy(run: Path) -> float:
    return json.loads((run / "summary.json").read_text())["accuracy"]


# ---- what cannot be read


def test_a_passing_read_error_deletes_nothing(run, tmp_path):
    """Both checkpoints fail to open once. Training used to begin anew, empty the metrics and delete the checkpoints."""
    (run / "summary.json").unlink()
    before = files(run)
    values = [str(path / "values.json") for path in checkpoints(run)]
    assert len(values) == 2
    status, output = faults.run(*TRAIN, "--output", run, fault=faults.FailingReads(values))
    assert status == 2 and f"Input/output error: '{values[1]}'" in output.splitlines()[-1], output
    after = files(run)
    assert all(after[name] == content for name, content in before.items())


def test_unreadable_metrics_stop_training(run):
    (run / "summary.json").unlink()
    (run / "metrics.jsonl").unlink()
    (run / "metrics.jsonl").mkdir()
    before = files(run)
    status, output = faults.run(*TRAIN, "--output", run)
    assert status == 2 and f"Not a regular file: '{run / 'metrics.jsonl'}'" in output and "Traceback" not in output
    assert before.items() <= files(run).items()


def test_a_folder_of_checkpoints_that_cannot_be_listed_stops_training(run):
    (run / "summary.json").unlink()
    status, output = faults.run(*TRAIN, "--output", run, fault=faults.FailingReads([str(run / "checkpoints")]))
    assert status == 2 and "Input/output error" in output and len(checkpoints(run)) == 2


# ---- what is damaged


def test_damaged_checkpoints_alone_need_fresh(run, monkeypatch, capsys):
    (run / "summary.json").unlink()
    for path in checkpoints(run):
        flip(path / "tensors.safetensors")
    before = files(run)
    message = refusal(monkeypatch, capsys, *TRAIN, "--output", run)
    assert "no checkpoint in" in message and "Nothing was changed. To begin anew, give --fresh" in message
    assert files(run) == before
    call(monkeypatch, *TRAIN, "--fresh", "--output", run)
    aside = files(run / "previous-1")
    assert all(aside[name] == content for name, content in before.items() if name != ".lock")
    assert verify(run).is_fine


def test_rows_without_checkpoints_need_fresh(run, monkeypatch, capsys):
    (run / "summary.json").unlink()
    shutil.rmtree(run / "checkpoints")
    before = files(run)
    assert "but no checkpoint to resume from" in refusal(monkeypatch, capsys, *TRAIN, "--output", run)
    assert files(run) == before


def test_a_damaged_checkpoint_is_renamed_and_never_deleted(run, undisturbed, monkeypatch, capsys):
    (run / "summary.json").unlink()
    newest = checkpoints(run)[-1]
    damaged = flip(newest / "tensors.safetensors")
    call(monkeypatch, *TRAIN, "--keep", "1", "--output", run)
    assert f"The damaged checkpoint is kept as {newest.name}.damaged" in capsys.readouterr().out
    assert (run / "checkpoints" / f"{newest.name}.damaged" / "tensors.safetensors").read_bytes() == damaged
    assert (run / "model.safetensors").read_bytes() == (undisturbed / "model.safetensors").read_bytes()


def test_a_checkpoint_whose_deletion_was_interrupted_is_deleted(run, monkeypatch):
    """A kill after the last save, while an earlier checkpoint is deleted: no later save would delete the rest."""
    (run / "summary.json").unlink()
    shutil.copytree(checkpoints(run)[0], run / "checkpoints" / ".partial-6")
    call(monkeypatch, *TRAIN, "--output", run)
    assert not list(run.rglob("*partial*"))


@pytest.mark.parametrize("file", ["model.safetensors", "summary.json", "recipe.toml", "manifest.json"])
def test_a_damaged_file_is_kept_and_written_again(run, undisturbed, monkeypatch, capsys, file):
    damaged = flip(run / file, 20)
    assert not verify(run).is_fine
    call(monkeypatch, *TRAIN, "--output", run)
    assert f"{file} is damaged; it was renamed to {file}.damaged" in capsys.readouterr().out
    assert (run / f"{file}.damaged").read_bytes() == damaged
    assert (run / "model.safetensors").read_bytes() == (undisturbed / "model.safetensors").read_bytes()
    assert accuracy(run) == accuracy(undisturbed) and verify(run).is_fine


def test_a_damaged_recipe_is_not_replaced_by_another(run, monkeypatch, capsys):
    flip(run / "recipe.toml", 20)
    before = files(run)
    message = refusal(monkeypatch, capsys, *TRAIN, "--lr", "0.01", "--output", run)
    assert "recipe.toml is damaged, so the settings of this command cannot be compared with the run's" in message
    assert files(run) == before


def test_a_forged_last_row_does_not_become_the_result(run, undisturbed, monkeypatch):
    """The summary is missing, and the accuracy in the last row was changed, with or without a matching checksum."""
    (run / "summary.json").unlink()
    lines = (run / "metrics.jsonl").read_text().splitlines()
    row = json.loads(lines[-1]) | {"accuracy": 0.999}
    (run / "metrics.jsonl").write_text("\n".join([*lines[:-1], json.dumps(row)]) + "\n")
    call(monkeypatch, *TRAIN, "--output", run)
    assert accuracy(run) == accuracy(undisturbed) != 0.999


def test_a_lost_row_is_said_and_the_file_is_kept(run, monkeypatch, capsys):
    (run / "summary.json").unlink()
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text("".join(lines[:2] + lines[3:]))
    call(monkeypatch, *TRAIN, "--output", run)
    said = " ".join(capsys.readouterr().out.split())
    assert "metrics.jsonl is damaged: 4 of 6 rows before step 60 are intact" in said
    assert (run / "metrics.jsonl.damaged").read_text() == "".join(lines[:2] + lines[3:])
    verdict = verify(run)
    text = "\n".join(verdict.lines())
    assert not verdict.is_fine and "it has the epochs 1, 2, 5, 6" in text
    assert "To get all rows, train again with --fresh" in text  # the same command would change nothing


# ---- folders of older versions


def test_a_finished_run_of_an_older_version_is_left_alone(run, monkeypatch):
    before = files(make_old(run))
    with pytest.warns(UserWarning, match=r"has no manifest\.json"):
        call(monkeypatch, *TRAIN, "--output", run)
    assert files(run) == before


def test_an_unfinished_run_of_an_older_version_is_continued_with_checksums(run, undisturbed, monkeypatch):
    make_old(run)
    (run / "summary.json").unlink()
    call(monkeypatch, *TRAIN, "--output", run)
    assert verify(run).is_fine and {finding.state for finding in verify(run).findings} == {"whole"}
    assert (run / "metrics.jsonl").read_bytes() == (undisturbed / "metrics.jsonl").read_bytes()


@pytest.mark.parametrize("wrong", [{"flops": "x"}, {"accuracy": 10**400}])
def test_a_summary_of_other_values_is_written_again(run, undisturbed, monkeypatch, wrong):
    """Its checksum is right, because there is no manifest or a stranger made it."""
    make_old(run)
    path = run / "summary.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | wrong))
    call(monkeypatch, *TRAIN, "--output", run)
    assert accuracy(run) == accuracy(undisturbed) and verify(run).is_fine


# ---- another run


def test_the_recipe_is_checked_under_the_lock(undisturbed, tmp_path, monkeypatch, capsys):
    """Another process trains another recipe in the folder after this one has looked at it, and before it gets the lock."""
    folder, set_up = tmp_path / "run", runs.set_up

    def meanwhile(*args):
        shutil.copytree(undisturbed, folder)
        return set_up(*args)

    monkeypatch.setattr(runs, "set_up", meanwhile)
    assert "holds a run with other settings" in refusal(monkeypatch, capsys, *TRAIN, "--lr", "0.01", "--output", folder)
    assert files(folder) == files(undisturbed)


def test_a_run_that_another_process_finished_meanwhile_is_not_trained_again(undisturbed, tmp_path, monkeypatch, capsys):
    folder, set_up = tmp_path / "run", runs.set_up
    monkeypatch.setattr(runs, "set_up", lambda *args: (shutil.copytree(undisturbed, folder), set_up(*args))[1])
    call(monkeypatch, *TRAIN, "--output", folder)
    assert files(folder) == files(undisturbed) and "epoch" not in capsys.readouterr().out


# ---- begin anew


def test_fresh_moves_everything_aside_and_counts(run, undisturbed, monkeypatch, capsys):
    (run / "notes.txt").write_text("mine")
    before = {name: content for name, content in files(run).items() if name not in (".lock", "notes.txt")}
    for number in (1, 2):
        call(monkeypatch, *TRAIN, "--fresh", "--output", run)
        assert f"moved to {run}/previous-{number}. To continue this one later, leave out --fresh." in capsys.readouterr().out
        assert verify(run).is_fine and (run / "notes.txt").read_text() == "mine"
    assert files(run / "previous-1") == before
    assert (run / "model.safetensors").read_bytes() == (undisturbed / "model.safetensors").read_bytes()


def test_fresh_accepts_another_recipe_and_an_empty_folder(run, tmp_path, monkeypatch):
    call(monkeypatch, *TRAIN, "--fresh", "--epochs", "2", "--output", run)
    assert "epochs = 2\n" in (run / "recipe.toml").read_text() and (run / "previous-1" / "recipe.toml").exists()
    call(monkeypatch, *TRAIN, "--fresh", "--epochs", "2", "--output", tmp_path / "new")
    assert not list((tmp_path / "new").glob("previous-*"))


def test_a_folder_whose_name_looks_like_markup_is_printed_as_it_is(tmp_path, monkeypatch, capsys):
    for flags in ((), ("--fresh",)):
        call(monkeypatch, *TRAIN, "--epochs", "2", *flags, "--output", tmp_path / "a[/b]")
    printed = capsys.readouterr().out
    assert f"moved to {tmp_path}/a[/b]/previous-1" in printed and f"MFLOPs. {tmp_path}/a[/b]\n" in printed


def test_a_process_that_torchrun_restarted_does_not_begin_anew(run, monkeypatch):
    before = files(run)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    call(monkeypatch, *TRAIN, "--fresh", "--output", run)
    assert files(run) == before


# ---- links and strange names


def test_links_in_a_folder_lead_no_write_astray(tmp_path, monkeypatch, capsys):
    outside, run = tmp_path / "outside", tmp_path / "run"
    outside.mkdir()
    run.mkdir()
    names = ["recipe.toml", "summary.json", "manifest.json", "model.safetensors"]
    names += [f".{name}.{os.getpid()}.partial" for name in names]
    for name in names:
        (outside / name).write_text("precious")
        (run / name).symlink_to(outside / name)
    call(monkeypatch, *TRAIN, "--fresh", "--epochs", "2", "--output", run)
    assert all((outside / name).read_text() == "precious" for name in names)
    assert verify(run).is_fine


@pytest.mark.parametrize("name", [".lock", "checkpoints", "tensorboard", "metrics.jsonl"])
def test_a_link_that_training_would_write_through_is_refused(tmp_path, name):
    outside, run = tmp_path / "outside", tmp_path / "run"
    run.mkdir()
    if name in ("checkpoints", "tensorboard"):
        outside.mkdir()
    elif name == ".lock":
        outside.write_text("precious")
    (run / name).symlink_to(outside)  # metrics.jsonl: a link to nothing
    status, output = faults.run(*TRAIN, "--epochs", "2", "--output", run)
    assert status == 2 and "Traceback" not in output and ("symbolic link" in output)
    assert name != ".lock" or outside.read_text() == "precious"
    assert name != "metrics.jsonl" or not outside.exists()
