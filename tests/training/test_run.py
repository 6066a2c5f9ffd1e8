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

from optg.data.memory import InMemory
from optg.deploy.export import open_trained
from optg.training import recipe
from optg.training.folder import RunFolder
from optg.training.prepare import refuse_other_plan
from optg.training.recipe import Plan, Recipe
from tests.cli.calling import call, refusal
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
    assert 1.5 < summary["training_flops"] / (summary["dense_flops"] * 6 * 160) < 3  # OptG reads all gradients in each step


def test_phoenix_names_the_schedule_that_it_is_meant_for(tmp_path, monkeypatch, capsys):
    small = ("train", *SMALL, "--method", "phoenix", "--max-steps", "4")
    call(monkeypatch, *small, "--output", tmp_path / "cosine")
    assert "phoenix is meant for --schedule hold; this run uses --schedule cosine\n" in capsys.readouterr().out
    call(monkeypatch, *small, "--schedule", "hold", "--output", tmp_path / "hold")
    assert "is meant for" not in capsys.readouterr().out


def test_with_a_validation_split_the_test_images_are_looked_at_once(tmp_path, monkeypatch, capsys):
    seen = []
    for name in ("test", "validation"):
        method = getattr(InMemory, name)
        monkeypatch.setattr(InMemory, name, lambda self, name=name, method=method: seen.append(name) or method(self))
    call(monkeypatch, "train", *SMALL, "--validate", "--output", tmp_path / "run")
    assert seen == ["validation"] * 6 + ["test"]
    assert capsys.readouterr().out.count("validation accuracy") == 6
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert summary["settings"]["validate"] and summary["validation"]["images"] == 14  # the tenths of 4 classes
    assert all(row["measured_on"] == "validation images" for row in rows) and rows[-1]["step"] == 6 * (146 // 16)
    assert summary["validation"]["accuracy"] == rows[-1]["accuracy"] and summary["validation"]["loss"] == rows[-1]["test_loss"]
    call(monkeypatch, "evaluate", tmp_path / "run", "--device", "cpu")
    assert f"accuracy {summary['accuracy']:.2%}" in capsys.readouterr().out
    assert "validate = true" in (tmp_path / "run" / "recipe.toml").read_text()


def test_a_run_with_a_validation_split_resumes_bit_for_bit(tmp_path, monkeypatch):
    call(monkeypatch, "train", *SMALL, "--validate", "--output", tmp_path / "whole")
    command = ("train", *SMALL, "--validate", "--model", "tests.training.user_code:stopping", "--output", tmp_path / "parts")
    for _ in range(2):
        with pytest.raises(SystemExit, match="143"):
            call(monkeypatch, *command)
    call(monkeypatch, *command)
    whole, parts = (load_file(tmp_path / name / "model.safetensors") for name in ("whole", "parts"))
    assert all((tensor == parts[name]).all() for name, tensor in whole.items())
    accuracies = [json.loads((tmp_path / name / "summary.json").read_text())["accuracy"] for name in ("whole", "parts")]
    assert accuracies[0] == accuracies[1]


def test_runs_of_earlier_versions_continue_without_the_setting(undisturbed):
    assert "validate" not in (undisturbed / "recipe.toml").read_text()


def test_a_run_can_be_repeated_from_its_recipe(undisturbed, tmp_path):
    recipe = str(undisturbed / "recipe.toml")
    assert optg("train", "--recipe", recipe, "--device", "cpu", folder=tmp_path / "again").returncode == 0
    assert (tmp_path / "again" / "model.safetensors").read_bytes() == (undisturbed / "model.safetensors").read_bytes()


def test_a_model_with_options_can_be_opened_repeated_and_exported(tmp_path, monkeypatch, capsys):
    call(monkeypatch, "train", *SMALL, "--model.width", "12", "--max-steps", "5", "--output", tmp_path / "run")
    settings = json.loads((tmp_path / "run" / "summary.json").read_text())["settings"]
    assert settings["model_options"] == {"width": 12}
    for command in ("evaluate", "summary"):
        call(monkeypatch, command, tmp_path / "run")
    call(monkeypatch, "train", "--recipe", tmp_path / "run" / "recipe.toml", "--device", "cpu", "--output", tmp_path / "again")
    assert (tmp_path / "again/model.safetensors").read_bytes() == (tmp_path / "run/model.safetensors").read_bytes()
    assert load_file(tmp_path / "again/model.safetensors")["5.weight"].shape == (12, 96)
    described = open_trained(tmp_path / "run").about
    assert described.origin["model_options"] == "width=12"


def test_a_vision_transformer_for_another_image_size_is_refused_with_the_option_to_give(
    torchvision, tmp_path, monkeypatch, capsys
):
    command = ("train", "--model", "timm:vit_tiny_patch16_224", "--model.depth", "1", "--data", "synthetic:3x32x32:10:64")
    message = refusal(monkeypatch, capsys, *command, "--output", tmp_path / "run")
    assert message.startswith("optg: timm:vit_tiny_patch16_224 does not take images of 3×32×32; give --model.img-size 32, ")
    assert message.count("\n") == 1 and not (tmp_path / "run").exists()
    small = ("--model.img-size", "32", "--max-steps", "2", "--batch-size", "8", "--device", "cpu")
    call(monkeypatch, *command, *small, "--output", tmp_path / "run")
    assert (tmp_path / "run" / "summary.json").exists()


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
    (folder.checkpoints / "step-000000001" / "values.json").touch()
    with pytest.raises(recipe.RecipeError, match=r"\(the run: lr = 0.05; this command: lr = 0.3\)"):
        refuse_other_plan(after, folder)
    before.methods = {"optg": {"alpha": 1.0}}
    (tmp_path / "recipe.toml").write_text(recipe.dump(before))
    with pytest.raises(recipe.RecipeError, match=r"\(the run: \[methods.\"optg\"\], alpha = 1.0; this command: –\)"):
        refuse_other_plan(Plan(before.recipe), folder)


def test_a_run_that_cannot_start_leaves_no_folder(tmp_path, monkeypatch, capsys):
    command = ("train", *SMALL, "--epochs", "2", "--output", str(tmp_path / "run"))
    with pytest.raises(SystemExit, match="2"):
        call(monkeypatch, *command, "--model", "resnet20")
    assert "resnet20 does not take images of" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_an_output_that_is_a_file_is_refused(tmp_path, monkeypatch, capsys):
    (tmp_path / "notes.txt").write_text("mine")
    expected = f"{tmp_path / 'notes.txt'} is a file; expected a folder for the run"
    assert expected in refusal(monkeypatch, capsys, "train", *SMALL, "--output", tmp_path / "notes.txt")
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_the_files_of_a_finished_run_are_not_rewritten(undisturbed, tmp_path, monkeypatch, capsys):
    folder = tmp_path / "copy"
    shutil.copytree(undisturbed, folder)
    shutil.rmtree(folder / "checkpoints")
    before = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    call(monkeypatch, "train", *SMALL, "--keep", "3", "--output", str(folder))
    assert f"{folder} has finished before; --fresh trains it again" in capsys.readouterr().out
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
