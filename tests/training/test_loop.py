"""Training for a number of steps: `--max-steps`. (Runs by epochs are tested in test_run.py and test_resume.py.)"""

import json
import warnings
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.cli.calling import call, refusal
from tests.training.runs import SMALL

UNEQUAL = ("seconds", "images_per_second", "checksum")
STOPPING = ("--model", "tests.training.user_code:stopping")  # stops itself after 15 and 20 steps; an epoch has 10


def train(monkeypatch: pytest.MonkeyPatch, folder: Path, *args: str) -> dict:
    """Train in this process, as `optg train --minutes 60` does, with warnings as errors. Return the summary."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        call(monkeypatch, "train", *SMALL, "--minutes", "60", *args, "--output", folder)
    return json.loads((folder / "summary.json").read_text())


def read_rows(folder: Path) -> list[dict]:
    """Return the metrics without the times, and without the checksums, which cover the times."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in row.items() if key not in UNEQUAL} for row in rows]


def zeros_and_weights(folder: Path) -> tuple[int, int]:
    weights = [t for name, t in load_file(folder / "model.safetensors").items() if name.endswith("weight")]
    return sum(int((t == 0).sum()) for t in weights), sum(t.numel() for t in weights)


@pytest.mark.parametrize("method", ["optg", "gmp", "rigl", "imp", "dense"])
def test_training_ends_within_an_epoch_at_the_exact_sparsity(method, tmp_path, monkeypatch):
    sparsity = "0" if method == "dense" else "0.9"
    options = ["--method.every", "4"] if method == "rigl" else []
    summary = train(monkeypatch, tmp_path, "--max-steps", "25", "--method", method, "--sparsity", sparsity, *options)
    rows = read_rows(tmp_path)
    assert [(row["epoch"], row["step"]) for row in rows] == [(1, 10), (2, 20), (3, 25)]
    assert summary["settings"]["max_steps"] == 25 and summary["settings"]["epochs"] == 3
    zeros, size = zeros_and_weights(tmp_path)
    assert zeros == -(-size * int(float(sparsity) * 10) // 10)
    if method != "imp":  # which restarts the learning rate in each of its cycles
        assert rows[-1]["lr"] < rows[0]["lr"] / 10  # the cosine ends with step 25, not with the recipe's epochs


def test_optg_cuts_within_a_single_epoch(tmp_path, monkeypatch):
    train(monkeypatch, tmp_path, "--max-steps", "8")
    [row] = read_rows(tmp_path)
    zeros, size = zeros_and_weights(tmp_path)
    assert row["step"] == 8 and row["removed"] >= zeros == -(-size * 9 // 10) and row["revived"] > 0


def test_a_single_epoch_equals_as_many_steps(tmp_path, monkeypatch):
    for folder, length in ((tmp_path / "steps", ("--max-steps", "10")), (tmp_path / "epochs", ("--epochs", "1"))):
        train(monkeypatch, folder, *length)
    assert (tmp_path / "steps/model.safetensors").read_bytes() == (tmp_path / "epochs/model.safetensors").read_bytes()


def test_whole_epochs_have_the_same_learning_rates_as_the_same_number_of_steps(tmp_path, monkeypatch):
    for folder, length in ((tmp_path / "steps", ("--max-steps", "60")), (tmp_path / "epochs", ("--epochs", "6"))):
        train(monkeypatch, folder, "--method", "dense", "--sparsity", "0", *length)
    assert read_rows(tmp_path / "steps") == read_rows(tmp_path / "epochs")
    assert (tmp_path / "steps/model.safetensors").read_bytes() == (tmp_path / "epochs/model.safetensors").read_bytes()


def test_a_run_by_steps_resumes_within_an_epoch_with_the_same_bytes(tmp_path, monkeypatch, capsys):
    stopped, whole = tmp_path / "stopped", tmp_path / "whole"
    for step in (15, 20):
        with pytest.raises(SystemExit, match="143"):
            train(monkeypatch, stopped, *STOPPING, "--max-steps", "25")
        assert f"Stopped at step {step} of 25" in capsys.readouterr().err
    train(monkeypatch, stopped, *STOPPING, "--max-steps", "25")
    train(monkeypatch, whole, "--max-steps", "25")
    assert read_rows(stopped) == read_rows(whole)
    interrupted, uninterrupted = load_file(stopped / "model.safetensors"), load_file(whole / "model.safetensors")
    assert interrupted.pop("calls") == 25
    assert all(interrupted[name].equal(tensor) for name, tensor in uninterrupted.items())


def test_a_warmup_longer_than_training_is_refused(tmp_path, monkeypatch, capsys):
    message = refusal(monkeypatch, capsys, "train", *SMALL, "--max-steps", "20", "--warmup", "2", "--output", tmp_path / "run")
    assert "warmup is 2 epochs of 10 steps; expected fewer steps than max_steps, which is 20" in message
    message = refusal(monkeypatch, capsys, "train", *SMALL, "--max-steps", "0", "--output", tmp_path / "run")
    assert "max_steps is 0; expected at least 1" in message and not (tmp_path / "run").exists()
