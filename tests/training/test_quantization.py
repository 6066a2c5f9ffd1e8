"""optg train --quantize int8: the last part trains with fake quantization, resumes bit for bit, and leaves both models."""

import builtins
import dataclasses
import json
import math
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import optg
from optg.deploy.export import export
from optg.deploy.qat import quantized_run as open_int8
from optg.files import fingerprint
from optg.methods import METHODS
from optg.training import recipe
from optg.training.checkpoint import list_checkpoints
from optg.training.manifest import Manifest
from optg.training.parallel import Parallel
from optg.training.rates import learning_rate
from optg.training.recipe import RecipeError
from optg.training.saved import SavedRun
from optg.training.setup import set_up
from optg.training.step import TrainStep
from tests.cli.calling import call, refusal
from tests.training.runs import USER_CODE, read_lines

SMALL = [
    *USER_CODE, "--model", "tests.training.user_code:normed", "--epochs", "6", "--batch-size", "16", "--sparsity", "0.8",
    "--device", "cpu", "--trust", "--quantize", "int8",
]  # fmt: skip
START, TOTAL = 54, 60
FILES = ("model.safetensors", "int8-ranges.safetensors")


@pytest.fixture(scope="module")
def quantized_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was never interrupted."""
    folder = tmp_path_factory.mktemp("runs") / "whole"
    with pytest.MonkeyPatch.context() as patch:
        call(patch, "train", *SMALL, "--output", folder)
    return folder


def bytes_of(folder: Path) -> list[bytes]:
    return [(folder / name).read_bytes() for name in FILES]


class Killed(BaseException):
    """As if the process had died."""


def after_step(monkeypatch: pytest.MonkeyPatch, number: int, action: Any) -> None:
    """Do something during the given step of training, after its update."""
    original = TrainStep.__call__

    def wrapper(self: TrainStep, *args: Any) -> Any:
        loss = original(self, *args)
        if self.sparsifier.clock.step == number:
            action()
        return loss

    monkeypatch.setattr(TrainStep, "__call__", wrapper)


def stop() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def kill() -> None:
    raise Killed


def test_a_run_stopped_around_the_change_ends_with_the_same_bytes(
    quantized_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ("train", *SMALL, "--minutes", "60", "--output", tmp_path / "run")
    for step in (START, START + 3, TOTAL):
        with monkeypatch.context() as patch, pytest.raises(SystemExit, match="143"):
            after_step(patch, step, stop)
            call(patch, *command)
        saved = list_checkpoints(tmp_path / "run" / "checkpoints")[-1]
        ranges = [name for name in load_file(saved / "tensors.safetensors") if name.startswith("quantization.")]
        assert saved.name == f"step-{step:09d}" and bool(ranges) == (step > START)
    call(monkeypatch, *command)
    assert bytes_of(tmp_path / "run") == bytes_of(quantized_run)


def test_a_run_killed_in_the_quantized_part_ends_with_the_same_bytes(
    quantized_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ("train", *SMALL, "--minutes", "1e-6", "--output", tmp_path / "run")
    with monkeypatch.context() as patch, pytest.raises(Killed):
        after_step(patch, START + 2, kill)
        call(patch, *command)
    assert list_checkpoints(tmp_path / "run" / "checkpoints")[-1].name == f"step-{START + 1:09d}"
    call(monkeypatch, *command)
    assert bytes_of(tmp_path / "run") == bytes_of(quantized_run)


def test_the_folder_holds_the_float_model_and_the_ranges(
    quantized_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    summary, rows = json.loads((quantized_run / "summary.json").read_text()), read_lines(quantized_run / "metrics.jsonl")
    assert 0 <= summary["int8_accuracy"] <= 1 and summary["accuracy"] == json.loads(rows[-1])["accuracy"]
    assert summary["options"]["end"] == 0.9 and summary["method"] == "optg"
    assert 'quantize = "int8"' in (quantized_run / "recipe.toml").read_text()
    assert "activation" not in str(load_file(quantized_run / "model.safetensors").keys())
    listed = json.loads((quantized_run / "manifest.json").read_text())["files"]
    assert {*FILES, "summary.json", "recipe.toml"} == listed.keys()
    call(monkeypatch, "evaluate", quantized_run, "--trust")
    assert f"{summary['accuracy']:.2%}" in capsys.readouterr().out
    call(monkeypatch, "summary", quantized_run, "--trust")
    call(monkeypatch, "report", quantized_run, "--output", tmp_path / "report")
    call(monkeypatch, "export", quantized_run, "--trust", "--output", tmp_path / "model.optg")
    with pytest.raises(SystemExit, match="0"):
        call(monkeypatch, "verify", quantized_run)
    assert "whole         int8-ranges.safetensors" in capsys.readouterr().out


def test_the_int8_model_of_a_run_and_of_its_checkpoints(quantized_run: Path) -> None:
    first, last = (SavedRun.open(path) for path in list_checkpoints(quantized_run / "checkpoints"))
    with pytest.raises(ValueError, match="saved before the quantized part of training"):
        first.ranges()
    states = [open_int8(saved).state_dict() for saved in (SavedRun.open(quantized_run), last)]
    assert states[0].keys() == states[1].keys() and all(torch.equal(value, states[1][key]) for key, value in states[0].items())
    weights = load_file(quantized_run / "model.safetensors")
    for name in ("conv1.weight", "conv2.weight", "out.weight"):
        assert states[0][name].dtype == torch.int8 and not states[0][name][weights[name] == 0].any()


def test_an_exported_file_has_the_ranges_of_training(quantized_run: Path, tmp_path: Path) -> None:
    assert "(int8, with the ranges of its training)" in export(quantized_run, "packed", tmp_path / "m.optg", "int8")
    saved, images = SavedRun.open(quantized_run), torch.randn(5, *SavedRun.open(quantized_run).shape)
    expected = optg.compile(open_int8(saved), images[:1])(images)
    assert torch.equal(optg.compile(optg.load(tmp_path / "m.optg"), images[:1])(images), expected)


def test_the_first_steps_are_those_of_a_run_without_int8(quantized_run: Path, tmp_path: Path, monkeypatch) -> None:
    plain = [arg for arg in SMALL if arg not in ("--quantize", "int8")]
    call(monkeypatch, "train", *plain, "--method.end", "0.9", "--output", tmp_path / "run")
    rows, expected = (
        [json.loads(line)["loss"] for line in read_lines(f / "metrics.jsonl")] for f in (tmp_path / "run", quantized_run)
    )
    assert rows[:5] == expected[:5] and rows[5] != expected[5]


def test_a_damaged_file_of_ranges_is_found_and_written_again(
    quantized_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = shutil.copytree(quantized_run, tmp_path / "run")
    content = (folder / FILES[1]).read_bytes()
    (folder / FILES[1]).write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(SystemExit, match="1"):
        call(monkeypatch, "verify", folder)
    assert "damaged       int8-ranges.safetensors" in capsys.readouterr().out
    call(monkeypatch, "train", *SMALL, "--output", folder)
    assert bytes_of(folder) == bytes_of(quantized_run)


@pytest.mark.parametrize(
    "change",
    [
        lambda low, high: {},
        lambda low, high: {"minimum": low},
        lambda low, high: {"minimum": low, "maximum": high[:2].clone()},
        lambda low, high: {"minimum": low[None], "maximum": high[None]},
        lambda low, high: {"minimum": low.long(), "maximum": high.long()},
        lambda low, high: {"minimum": low * math.nan, "maximum": high},
        lambda low, high: {"minimum": low, "maximum": high + math.inf},
        lambda low, high: {"minimum": low - 2e38, "maximum": high + 2e38},
        lambda low, high: {"minimum": high, "maximum": low},
    ],
)
def test_a_strangers_ranges_are_checked(
    quantized_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], change: Any
) -> None:
    folder = shutil.copytree(quantized_run, tmp_path / "run")
    ranges = load_file(folder / FILES[1])
    save_file(change(ranges["minimum"], ranges["maximum"]), folder / FILES[1])
    manifest = Manifest.read(folder)
    assert manifest is not None
    manifest.files[FILES[1]] = fingerprint(folder / FILES[1])
    manifest.write(folder)
    message = refusal(monkeypatch, capsys, "export", folder, "--trust", "--values", "int8", "--output", tmp_path / "m.optg")
    assert "the ranges of activations are damaged" in message and not (tmp_path / "m.optg").exists()


class Twin(nn.Module):
    """Stands for a quantized model, without the packages that make one."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.call, self.calls = [model], 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.call[0](x)


class PlainInt8:
    def require_packages(self) -> None:
        pass

    def fake_quantized(self, model: nn.Module, images: torch.Tensor) -> nn.Module:
        return Twin(model)

    def ranges_of(self, twin: Any) -> dict[str, torch.Tensor]:
        return {}

    def quantized(self, model: nn.Module, *_: Any) -> nn.Module:
        return model


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", METHODS)
def test_masks_are_frozen_or_the_method_is_refused(name: str) -> None:
    plan = recipe.load("digits")
    sparsity = 0.0 if name in ("dense", "keep") else 0.8
    model, options = "tests.training.user_code:normed", {"every": 4} if name in ("rigl", "set", "granet") else {}
    plan.recipe = dataclasses.replace(
        plan.recipe, model=model, data="synthetic:1x8x8:10:64", batch_size=16, epochs=10, sparsity=sparsity, quantize="int8"
    )
    plan.method, plan.methods = name, {name: options}
    if name == "gsm":
        with pytest.raises(RecipeError, match=rf"freezes the masks at step 36 of 40, but {name} reaches its sparsity at step"):
            set_up(plan, Parallel(), PlainInt8())
        return
    setup = set_up(plan, Parallel(), PlainInt8())
    clock, steps, masks = setup.sparsifier.clock, setup.data.steps_per_epoch, []
    for epoch in range(10):
        for images, labels in setup.data.train(epoch):
            setup.quantize_if_due()
            setup.step(images, labels, learning_rate(setup.recipe, clock, steps))
            masks.append([mask.clone() for mask in setup.sparsifier.masks.values()])
    assert setup.quantization and setup.quantization.twin.calls == 4 and setup.sparsifier.verify().ok
    assert all(torch.equal(a, b) for a, b in zip(masks[36], masks[39])) and len(masks) == 40
    assert setup.sparsifier.method == METHODS["keep"](ham=setup.method.ham)


@pytest.mark.parametrize(
    "flags, reason",
    [
        (["--precision", "bfloat16"], "--quantize int8 needs --precision float32, not bfloat16"),
        (["--quantize-from", "1"], "quantize_from is 1.0; expected a share of training, above 0 and below 1"),
        (["--method", "gsm"], "gsm reaches its sparsity at step 60"),
        (["--model", "tests.training.user_code:model"], "no layer of this model can run in int8"),
    ],
)
def test_what_cannot_work_is_refused_before_training(flags, reason, tmp_path, monkeypatch, capsys) -> None:
    assert reason in " ".join(refusal(monkeypatch, capsys, "train", *SMALL, *flags, "--output", tmp_path / "run").split())
    assert not (tmp_path / "run").exists()


def test_several_processes_are_refused() -> None:
    plan = recipe.load("digits")
    plan.recipe.quantize = "int8"
    with pytest.raises(RecipeError, match="trains in a single process; leave out --parallel ddp"):
        set_up(plan, Parallel("ddp"), PlainInt8())


def test_a_missing_package_is_named_before_training(tmp_path, monkeypatch, capsys) -> None:
    original = builtins.__import__

    def without(name: str, *args: Any) -> Any:
        if name.startswith("torchao"):
            raise ImportError("No module named 'torchao'")
        return original(name, *args)

    monkeypatch.setattr(builtins, "__import__", without)
    message = refusal(monkeypatch, capsys, "train", *SMALL, "--output", tmp_path / "run")
    assert "pip install 'optg[int8]'" in " ".join(message.split()) and not (tmp_path / "run").exists()


def test_older_recipes_are_read_and_written_as_before() -> None:
    plan = recipe.load("digits")
    assert plan.recipe.quantize is None and "quantize" not in recipe.dump(plan)
    plan.recipe = dataclasses.replace(plan.recipe, quantize="int8", quantize_from=0.8)
    assert recipe.read(recipe.dump(plan), "copy", "recipe").recipe == plan.recipe
