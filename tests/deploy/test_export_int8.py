"""`optg export --values int8`, and the commands that take the file."""

import json
import shutil
from pathlib import Path

import pytest
import torch

import optg
from optg.deploy.bench import measure as measure_module
from optg.deploy.bench.measure import MeasureRequest, measure
from optg.deploy.bench.subject import Subject, describe_subject, open_subject
from optg.deploy.calibration import calibration_images
from optg.deploy.export import export, load_data, open_trained
from optg.training.recipe import Recipe
from optg.training.saved import SavedRun
from tests.deploy.conftest import Cli
from tests.report.fake_runs import list_files


@pytest.fixture(scope="module")
def int8_file(trained_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("int8") / "model.optg"
    message = export(trained_run, "packed", path, "int8")
    assert f"{path}: {path.stat().st_size / 1e6:.3f} MB (int8, calibrated on 512 training images), " in message
    assert "of the 0.394 MB of the dense float32 tensors" in message and "of 97,802 parameters are non-zero" in message
    return path


def test_file_equals_the_quantized_model(trained_run: Path, int8_file: Path, cli: Cli) -> None:
    trained, recipe = open_trained(trained_run), SavedRun.open(trained_run).plan.recipe
    images = calibration_images(recipe)
    quantized = optg.quantize(trained.model, images.split(64))
    data = load_data(recipe, 100)
    tested, labels = (torch.cat(parts) for parts in zip(*data.test()))
    fast, direct = (optg.compile(model, trained.example) for model in (optg.load(int8_file), quantized))
    assert torch.equal(fast(tested), direct(tested)) and "int8 sparse" in repr(fast)

    accuracy = float((direct(tested).argmax(1) == labels).double().mean())
    code, out, _ = cli("predict", int8_file, "--data", "test")
    assert code == 0 and f"accuracy {accuracy:.2%}  (360 images, " in out
    assert abs(accuracy - json.loads((trained_run / "summary.json").read_text())["accuracy"]) < 0.02


def test_header_says_how_it_was_made_and_the_bytes_are_always_the_same(trained_run: Path, int8_file: Path, cli: Cli) -> None:
    about, run = optg.load(int8_file).about, open_trained(trained_run).about
    made = {"values": "int8", "calibration_images": 512, "calibration_seed": 0}
    assert about.origin == run.origin | made and (about.mean, about.labels) == (run.mean, run.labels)
    assert int8_file.stat().st_size < 0.1 * (trained_run / "model.safetensors").stat().st_size
    torch.manual_seed(99)
    checkpoint = sorted((trained_run / "checkpoints").iterdir())[-1]
    assert cli("export", trained_run, "--values", "int8", "--output", "again.optg")[0] == 0
    assert cli("export", checkpoint, "--values", "int8", "--shrink", "--output", "small.optg")[0] == 0
    assert Path("again.optg").read_bytes() == int8_file.read_bytes()
    small = optg.load("small.optg")
    assert small.about.origin["checkpoint"] == checkpoint.name and small.about.origin["calibration_images"] == 512


def test_calibration_images_are_those_of_the_seed_as_in_evaluation() -> None:
    images = calibration_images(Recipe(data="digits", seed=3))
    data = load_data(Recipe(data="digits", seed=3), 128)
    epoch = torch.cat([batch for batch, _ in data.train(0)])
    assert torch.equal(images, epoch[:512])  # the digits are not augmented
    assert not torch.equal(images, calibration_images(Recipe(data="digits", seed=4)))
    assert len(calibration_images(Recipe(data="synthetic:1x8x8:10:100"))) == 100  # all there are


def test_wrong_flags_and_missing_data_give_one_line(trained_run: Path, int8_file: Path, cli: Cli, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(trained_run, run)
    recipe = (run / "recipe.toml").read_text()
    (run / "recipe.toml").write_text(recipe.replace('data = "digits"', 'data = "imagenet"'))
    list_files(run)
    content = bytearray(int8_file.read_bytes())
    content[-9] ^= 1
    (tmp_path / "damaged.optg").write_bytes(content)
    for args, message in (
        (("export", trained_run, "--values", "int8", "--to", "onnx"), "--values int8 only works with --to packed"),
        (("export", trained_run, "--values", "int8", "--to", "safetensors"), "--values int8 only works with --to packed"),
        (("export", trained_run, "--folder", "data"), "--folder names the images that --values int8 is calibrated on"),
        (("export", int8_file, "--values", "int8"), "is already a packed file"),
        (("export", int8_file, "--to", "safetensors"), "holds int8 values, which safetensors files cannot hold"),
        (("export", int8_file, "--to", "onnx"), "holds int8 values, which onnx files cannot hold"),
        (("export", run, "--values", "int8", "--folder", "none"), "int8 is calibrated on 512 training images: none has no"),
        (("predict", tmp_path / "damaged.optg", "--data", "test"), "the tensors are damaged: their checksum differs"),
    ):
        code, out, err = cli(*args)
        assert code == 2 and message in err and err.count("\n") == 1 and not out, (args, err)
    assert (
        "put train/CLASS/*.JPEG and val/CLASS/*.JPEG there; or give their --folder" in cli("export", run, "--values", "int8")[2]
    )


def test_missing_torchao_gives_one_line(trained_run: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "torchao.quantization", None)
    code, out, err = cli("export", trained_run, "--values", "int8", "--output", "x.optg")
    assert code == 2 and "pip install 'optg[int8]'" in err and err.count("\n") == 1 and not out


def test_bench_measures_the_file_itself(int8_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure_module, "MIN_ROUNDS", 1)
    monkeypatch.setattr("optg.deploy.bench.int8_engines.calibration_images", None)  # nothing is calibrated
    timings, notes = measure(MeasureRequest(Subject(str(int8_file)), ["torch", "optg", "optg int8"], [2], 1, 0.01))
    assert [t.engine for t in timings] == ["torch", "optg", "optg int8"] and not notes
    plain, floats, int8 = (t.difference for t in timings)
    assert plain == 0 and floats < 1e-5 < int8 < 1  # random images lie outside of the range of the digits
    about = describe_subject(open_subject(Subject(str(int8_file))))
    assert about["packed_bytes"] == int8_file.stat().st_size and about["dense_bytes"] == 4 * about["parameters"]
