import sys
from dataclasses import fields

import numpy as np
import pytest

from optg.methods import METHODS
from optg.training.arguments import with_help
from optg.training.recipe import load
from tests.cli.calling import call, optg, refusal
from tests.training.runs import SMALL, masks
from tests.training.runs import optg as run_optg

FLAGS = [
    "recipe", "method", "output", "fresh", "parallel", "device", "minutes", "keep", "log", "tensorboard", "trust", "model",
    "model.KEY", "data", "folder", "sparsity", "epochs", "max-steps", "batch-size", "seed", "optimizer", "lr", "momentum",
    "nesterov", "weight-decay", "decay-norms",
    "schedule", "warmup", "cycles", "milestones", "gamma", "hold", "rate-per", "label-smoothing", "accumulate", "precision",
    "channels-last", "compile", "graph", "floor", "floor-by", "method.schedule", "method.alpha", "method.score-lr",
]  # fmt: skip


def test_help_shows_the_options_of_the_method_and_no_code_comments():
    text = optg("train", "--method", "rigl", "--help").stdout
    assert "options of rigl" in text and "--method.fraction" in text and "type:" not in text and "fmt:" not in text


@pytest.mark.parametrize("method", METHODS)
def test_every_option_of_a_method_has_help(method):
    for option in fields(with_help(METHODS[method])):
        text = option.type.__metadata__[0].help
        assert text and not text.startswith(("fmt:", "type:", "noqa")), option.name


def test_help_shows_every_flag(monkeypatch, capsys):
    with pytest.raises(SystemExit, match="0"):
        call(monkeypatch, "train", "--help")
    text = capsys.readouterr().out
    for flag in FLAGS:
        assert f"--{flag} " in text or f"--{flag}," in text, flag


@pytest.mark.parametrize(
    "args, message",
    [
        (["--recipe", "vgg19-cifar1"], "unknown recipe 'vgg19-cifar1'; did you mean 'vgg19-cifar10'"),
        (["--recipe", "nowhere.toml"], "there is no recipe file nowhere.toml"),
        (["--recipe"], "Missing value for argument '--recipe'"),
        (["--method", "rigle"], "unknown method 'rigle'; did you mean 'rigl'?"),
        (["--epoch", "3"], "--epochs"),
        (["--methd", "rigl"], "--method NAME"),
        (["--method", "rigl", "--method.fractoin", "0.3"], "--method.fraction"),
        (["--method", "rigl", "--method.alpha", "1"], "rigl has no option --method.alpha"),
        (["--epochs", "many"], "invalid"),
        (["--sparsity", "95"], "sparsity is 95.0; expected at least 0 and below 1"),
        (["--lr", "-1"], "lr is -1.0; expected above 0"),
        (["--batch-size", "0"], "batch_size is 0"),
        (["--batch-size", "5000"], "batch"),
        (["--max-steps", "1"], "training has a single step, expected at least 2"),
        (["--model", "resnet21"], "unknown model 'resnet21'"),
        (["--model", "no.such.module:f"], "no.such.module"),
        (["--model.img-size"], "--model.img-size has no value"),
        (["--model.img-size", "32"], "digits cannot be built with img_size=32"),
        (["--max-steps", "0"], "max_steps is 0; expected at least 1"),
        (["--data", "cifar11"], "unknown"),
        (["--data", "cifar10", "--folder", "/nonexistent"], "CIFAR-10"),
        (["--data", "imagenet", "--folder", "/nonexistent"], "/nonexistent"),
        (["--device", "gpu"], "unknown device 'gpu'; expected auto, cuda, cuda:N or cpu"),
        (["--keep", "0"], "--keep is 0; expected at least 1"),
        (["--minutes", "0"], "--minutes is 0.0; expected a number above 0"),
        (["--parallel", "ddp"], "--parallel ddp needs torchrun"),
        (["--method", "dense", "--sparsity", "0.5"], "dense training removes nothing"),
        (["--method", "keep", "--sparsity", "0.5"], "keep keeps the zeros that the model has; leave out sparsity=0.5"),
        (["--floor", "0.2"], "(that share of each part, rounded up)"),
        (["--floor", "1.5"], "floor is 1.5; expected above 0 and below 1"),
        (["--floor-by", "output"], "floor_by is output; expected part where no floor is given"),
    ],
)
def test_bad_input_gets_one_clear_message_and_no_folder(args, message, tmp_path, monkeypatch, capsys):
    assert message in refusal(monkeypatch, capsys, "train", *args, "--output", tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_missing_tensorboard_is_refused_before_training(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)  # as if it were not installed
    message = refusal(monkeypatch, capsys, "train", "--tensorboard", "--output", tmp_path / "run")
    assert "pip install 'optg[tensorboard]'" in message and not (tmp_path / "run").exists()


def test_no_resume_is_refused_with_the_new_flag(finished_run, monkeypatch, capsys):
    message = refusal(monkeypatch, capsys, "train", *SMALL, "--no-resume", "--output", finished_run)
    assert message.startswith("optg: --no-resume is gone: give --fresh to begin anew") and message.count("\n") == 1


def test_keep_trains_the_model_of_a_run_with_its_zeros(finished_run, tmp_path):
    model = ["--model", f"optg.experiments.trained:{finished_run}"]
    done = run_optg("train", *SMALL, *model, "--method", "keep", "--sparsity", "0", folder=tmp_path / "run")
    assert done.returncode == 0, done.stderr
    assert masks(tmp_path / "run") == masks(finished_run)


def test_a_floor_is_part_of_the_recipe(tmp_path):
    done = run_optg("train", *SMALL, "--floor", "0.05", folder=tmp_path / "run")
    assert done.returncode == 0, done.stderr
    assert "floor = 0.05" in (tmp_path / "run" / "recipe.toml").read_text()

    for kept in masks(tmp_path / "run").values():
        flat = np.array(kept).flatten()
        assert flat.sum() >= 0.05 * flat.size


def test_a_floor_may_hold_for_every_output_neuron(tmp_path):
    flags = "--floor", "1e-6", "--floor-by", "output", "--sparsity", "0.95"
    done = run_optg("train", *SMALL, *flags, folder=tmp_path / "run")
    assert done.returncode == 0, done.stderr
    assert 'floor_by = "output"' in (tmp_path / "run" / "recipe.toml").read_text()
    for name, kept in masks(tmp_path / "run").items():
        assert np.array(kept).reshape(len(kept), -1).any(1).all(), name


@pytest.mark.parametrize("name", ["a[/b]", "[red]", "a\u202eb", "new\nline"])
def test_any_name_of_a_folder(tmp_path, monkeypatch, capsys, name):
    call(monkeypatch, "train", *SMALL, "--epochs", "2", "--output", tmp_path / name)
    assert (tmp_path / name / "summary.json").is_file()
    shown = capsys.readouterr().out
    assert name.replace("\u202e", r"\u202e") in shown and "\u202e" not in shown


def test_any_name_of_the_data_folder(tmp_path, monkeypatch):
    folder = 'new\nline "quoted" \\ \t\x7f ü'
    for _ in range(2):  # the second call finds a finished run with the same recipe
        call(monkeypatch, "train", *SMALL, "--epochs", "2", "--folder", folder, "--output", tmp_path / "run")
    assert load(str(tmp_path / "run" / "recipe.toml")).recipe.folder == folder


def test_a_name_that_is_not_text_is_refused(tmp_path, monkeypatch, capsys):
    message = refusal(monkeypatch, capsys, "train", *SMALL, "--folder", "\udcff", "--output", tmp_path / "run")
    assert r"'\udcff' is not Unicode text" in message
