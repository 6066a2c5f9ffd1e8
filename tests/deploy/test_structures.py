"""`optg train --structure`: in the recipe, the summary, the exported file, and resumed runs."""

import json

import pytest
import torch

import optg
from optg.training.recipe import load


def test_a_structure_reaches_every_file(cli, tmp_path):
    run, command = tmp_path / "run", ("train", "--structure", "2:4", "--epochs", "2", "--method", "sr-ste")
    assert cli(*command, "--output", run)[0] == 0
    assert load(str(run / "recipe.toml")).recipe.structure == "2:4"
    summary = json.loads((run / "summary.json").read_text())
    assert summary["settings"]["structure"] == "2:4" and summary["settings"]["sparsity"] == 0.5
    assert cli("export", run, "--output", tmp_path / "model.optg")[0] == 0
    for name, weight in optg.load(tmp_path / "model.optg").state_dict().items():
        if weight.ndim > 1 and weight.shape[1] >= 4:
            assert ((weight.unflatten(1, (-1, 4)) != 0).sum(2) <= 2).all(), name


@pytest.mark.parametrize(("text", "expected"), [("*=2:4", 0.5), ("0*=1:4, *=2:4", 0.5), ("4*=1:4, *=2:4", 0.55)])
def test_patterns_that_are_all_nm_need_no_sparsity(cli, tmp_path, text, expected):
    """The first layer has one input and stays dense, so its rule does not count."""
    run = tmp_path / "run"
    assert cli("train", "--structure", text, "--epochs", "2", "--method", "gmp", "--output", run)[0] == 0
    assert json.loads((run / "summary.json").read_text())["sparsity"] == pytest.approx(expected, abs=0.01)


def test_channels_are_counted_after_shrinking(cli, tmp_path):
    run = tmp_path / "run"
    command = ("train", "--structure", "channel", "--sparsity", "0.5", "--epochs", "2", "--method", "gmp", "--output", run)
    assert cli(*command)[0] == 0
    summary = json.loads((run / "summary.json").read_text())
    assert summary["shrunk"]["parameters"] < summary["nonzero"]
    assert summary["shrunk"]["flops"] <= summary["flops"] < summary["dense_flops"]
    assert cli("export", run, "--shrink", "--output", tmp_path / "small.optg")[0] == 0
    small = optg.load(tmp_path / "small.optg")
    assert sum(t.numel() for t in small.state_dict().values() if t.dtype == torch.float32) < summary["parameters"] / 2


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--structure", "2:4", "--sparsity", "0.9"), "sparsity is 0.9, but structure '2:4' makes it 0.5; leave"),
        (("--structure", "4:2"), "structure is '4:2'; expected N:M with 0 < N < M ≤ 64, such as '2:4'"),
        (("--structure", "2x"), "unknown structure '2x'; expected a text like 'unstructured', '2:4', '1x4', 'channel'"),
        (("--structure", "channel", "--method", "rigl"), "rigl does not support structure 'channel'"),
    ],
)
def test_what_cannot_work_is_refused_in_one_line(cli, tmp_path, flags, message):
    code, _, error = cli("train", *flags, "--epochs", "2", "--output", tmp_path / "run")
    assert code == 2 and message in error and not (tmp_path / "run").exists()
