"""Whole runs: what they write, what they refuse, and how they end."""

import json
import math
import shlex
import shutil
import subprocess
import time
from pathlib import Path

import pytest
from safetensors.torch import load_file

from optg.training import recipe
from optg.training.folder import RunFolder
from optg.training.recipe import Plan, Recipe
from optg.training.run import refuse_other_plan
from tests.cli.calling import call
from tests.training.runs import SMALL, optg, read_lines, start


def test_a_run_writes_model_metrics_and_summary(undisturbed):
    summary = json.loads((undisturbed / "summary.json").read_text())
    assert summary["sparsity"] == pytest.approx(0.9, abs=1e-3) and summary["method"] == "optg"
    weights = load_file(undisturbed / "model.safetensors")
    zeros = sum(int((t == 0).sum()) for name, t in weights.items() if name.endswith("weight"))
    size = sum(t.numel() for name, t in weights.items() if name.endswith("weight"))
    assert zeros / size == summary["sparsity"]
    rows = [json.loads(line) for line in (undisturbed / "metrics.jsonl").read_text().splitlines()]
    assert [row["epoch"] for row in rows] == [1, 2, 3, 4, 5, 6] and rows[-1]["accuracy"] == summary["accuracy"]
    assert rows[-1]["removed"] == rows[-1]["revived"] == 0  # the last cut is at the start of the last epoch
    for row, before in zip(rows[1:], rows):
        zeros, zeros_before = (sum(layer[0] for layer in r["layers"].values()) for r in (row, before))
        assert zeros == round(row["sparsity"] * size) and zeros - zeros_before == row["removed"] - row["revived"]
    sigmoid = [1 / (1 + math.exp(-40 / 6 * (k - 6 / 2))) for k in range(1, 7)]  # Eq. 16, α = 40 / epochs
    assert [row["score_lr"] / row["lr"] for row in rows] == pytest.approx(sigmoid)
    assert summary["processes"] == 1 and summary["unreadable"] == 0


def test_a_run_can_be_repeated_from_its_recipe(undisturbed, tmp_path):
    recipe = str(undisturbed / "recipe.toml")
    assert optg("train", "--recipe", recipe, "--device", "cpu", folder=tmp_path / "again").returncode == 0
    assert (tmp_path / "again" / "model.safetensors").read_bytes() == (undisturbed / "model.safetensors").read_bytes()


def wait_for_checkpoint(folder: Path, process: subprocess.Popen[str]) -> None:
    while process.poll() is None and not list((folder / "checkpoints").glob("step-*")):
        time.sleep(0.01)


def test_a_folder_in_use_is_refused(tmp_path):
    process = start(tmp_path / "busy", "--epochs", "500")
    wait_for_checkpoint(tmp_path / "busy", process)
    second = optg("train", *SMALL, "--epochs", "500", folder=tmp_path / "busy")
    process.kill()
    process.communicate()
    assert second.returncode == 2 and "is in use by another process" in second.stderr


@pytest.mark.parametrize(
    ("method", "expected"),
    [
        ([], "the loss is nan at step 13; first non-finite gradient: inner.1.weight"),
        (
            ["--method", "rigl", "--method.every", "4"],
            "step 13: NaN in the scores of inner.1.weight",
        ),  # the exchange meets the NaN first
    ],
)
def test_a_non_finite_loss_stops_with_step_layer_and_checkpoint(tmp_path, method, expected):
    wrong = optg("train", *SMALL, "--model", "tests.training.user_code:diverging", *method, folder=tmp_path / "nan")
    assert wrong.returncode == 2 and "Traceback" not in wrong.stderr
    assert expected in wrong.stderr
    assert "step-0000000" in wrong.stderr


def test_another_recipe_in_the_same_folder_is_refused(undisturbed):
    wrong = optg("train", *SMALL, "--lr", "0.01", folder=undisturbed)
    assert wrong.returncode == 2 and "lr = 0.01" in wrong.stderr and "give another --output" in wrong.stderr


def test_only_the_data_folder_of_a_run_may_change(tmp_path):
    folder = RunFolder(tmp_path)
    before, after = Plan(Recipe(folder="/here")), Plan(Recipe(folder="/there"))
    (tmp_path / "recipe.toml").write_text(recipe.dump(before))
    refuse_other_plan(after, folder)
    after.recipe.lr = 0.3
    refuse_other_plan(after, folder)  # accepted: the folder has no results yet
    (folder.checkpoints / "step-000000001").mkdir(parents=True)
    with pytest.raises(recipe.RecipeError, match=r"\(there: lr = 0.05; here: lr = 0.3\)"):
        refuse_other_plan(after, folder)
    before.methods = {"optg": {"alpha": 1.0}}
    (tmp_path / "recipe.toml").write_text(recipe.dump(before))
    with pytest.raises(recipe.RecipeError, match=r"\(there: \[methods.\"optg\"\], alpha = 1.0; here: –\)"):
        refuse_other_plan(Plan(before.recipe), folder)


def test_a_run_that_cannot_start_leaves_no_folder(tmp_path, monkeypatch, capsys):
    command = ("train", *SMALL, "--epochs", "2", "--output", str(tmp_path / "run"))
    with pytest.raises(SystemExit, match="2"):
        call(monkeypatch, *command, "--model", "resnet20")
    assert "resnet20 does not take images of" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_the_files_of_a_finished_run_are_not_rewritten(undisturbed, tmp_path, monkeypatch):
    folder = tmp_path / "copy"
    shutil.copytree(undisturbed, folder)
    shutil.rmtree(folder / "checkpoints")
    before = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    call(monkeypatch, "train", *SMALL, "--keep", "3", "--output", str(folder))
    assert before == {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


@pytest.mark.parametrize("harm", ["last", "all", "garbage", "gone"])
def test_the_accuracy_survives_a_lost_row_of_metrics(undisturbed, tmp_path, monkeypatch, harm):
    folder = tmp_path / "copy"
    shutil.copytree(undisturbed, folder)
    expected = json.loads((folder / "summary.json").read_text())["accuracy"]
    lines = read_lines(folder / "metrics.jsonl")
    assert json.loads(lines[-2])["accuracy"] != expected
    (folder / "summary.json").unlink()
    left = {"last": "\n".join(lines[:-1]) + "\n" + lines[-1][:-20], "all": "", "garbage": '[1, 2]\n{"epoch": 3}\n\udcff\n'}
    (folder / "metrics.jsonl").write_text(left.get(harm, ""), errors="surrogateescape")
    if harm == "gone":
        (folder / "metrics.jsonl").unlink()
    call(monkeypatch, "train", *SMALL, "--output", str(folder))
    assert json.loads((folder / "summary.json").read_text())["accuracy"] == expected


def test_all_files_of_a_run_have_the_same_permissions(undisturbed):
    modes = {path.stat().st_mode & 0o777 for path in undisturbed.rglob("*") if path.is_file()}
    assert len(modes) == 1


def test_the_recorded_command_is_quoted_for_the_shell(tmp_path, monkeypatch):
    folder = tmp_path / "a run, <b>ü"
    call(monkeypatch, "train", *SMALL, "--epochs", "2", "--output", str(folder))
    assert shlex.split(json.loads((folder / "summary.json").read_text())["command"])[-1] == str(folder)
