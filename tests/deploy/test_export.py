"""From a run to a file and back, on the command line. OPTG_DATA may name a folder with the real CIFAR, for tests more."""

import json
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file

import optg
from optg import data as datasets
from optg.cli import main
from optg.data import cifar, digits
from optg.deploy import export, infer, packed
from optg.deploy.graph import capture
from optg.deploy.packed import About
from optg.training.recipe import Recipe
from tests.deploy.nets import sparse

Cli = Callable[..., tuple[int, str, str]]


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Cli:
    """The exit code and what is printed to both streams."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "400")

    def call(*args: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["optg", *map(str, args)])
        try:
            main()
            code = 0
        except SystemExit as end:
            code = int(end.code or 0)
        return code, *capsys.readouterr()

    return call


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A short run on the digits: 80 % of its weights are zeros."""
    folder = tmp_path_factory.mktemp("run") / "digits"
    args = ["--epochs", "4", "--sparsity", "0.8", "--output", str(folder), "--device", "cpu"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["optg", "train", *args])
        main()
    return folder


def test_any_model_is_saved_small_though_its_zeros_have_signs(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(192, 200), torch.nn.ReLU(), torch.nn.Linear(200, 7)).train()
    with torch.no_grad():
        for layer in (model[1], model[3]):
            layer.weight *= torch.rand_like(layer.weight) < 0.05
    size = optg.save(model, tmp_path / "model.optg", torch.randn(2, 3, 8, 8), name="mine")
    assert model.training and size == (tmp_path / "model.optg").stat().st_size < 0.15 * 4 * 40_000
    loaded = optg.load(tmp_path / "model.optg")
    assert (loaded.about.name, loaded.about.classes, loaded.about.shape) == ("mine", 7, (3, 8, 8))
    assert all(torch.equal(t, model.state_dict()[key]) for key, t in loaded.state_dict().items())
    images = torch.randn(5, 3, 8, 8)
    torch.testing.assert_close(loaded(images), model(images))


def test_a_run_becomes_a_small_file_and_comes_back(run: Path, cli: Cli, tmp_path: Path) -> None:
    code, out, _ = cli("export", run)
    assert code == 0 and f"{run}/model.optg" in out and "of the 0.394 MB of the dense float32 tensors" in out
    assert "of 98,026 parameters are not 0" in out and "of 1.50 MFLOPs" in out
    path = run / "model.optg"
    loaded, state = optg.load(path), load_file(run / "model.safetensors")
    assert path.stat().st_size < 0.28 * (run / "model.safetensors").stat().st_size
    assert all(torch.equal(value, state[name]) for name, value in loaded.state_dict().items()) and len(state) == len(
        loaded.state_dict()
    )
    about, summary = loaded.about, json.loads((run / "summary.json").read_text())
    assert about.account == {key: summary[key] for key in ("parameters", "nonzero", "flops", "dense_flops")}
    assert about.origin["accuracy"] == summary["accuracy"] and about.origin["method"] == "optg"
    assert (about.name, about.classes, about.shape) == (run.name, 10, (1, 8, 8)) and about.labels == tuple("0123456789")

    code, out, _ = cli("export", run, "--values", "bfloat16", "--output", tmp_path / "half.optg")
    assert code == 0 and "(weights as bfloat16)" in out and (tmp_path / "half.optg").stat().st_size < 0.7 * path.stat().st_size
    half = optg.load(tmp_path / "half.optg").state_dict()
    assert torch.equal(half["4.weight"], state["4.weight"].bfloat16().float()) and torch.equal(
        half["5.weight"], state["5.weight"]
    )


def test_a_checkpoint_is_exported_also_before_its_run_has_ended(run: Path, cli: Cli, tmp_path: Path) -> None:
    checkpoint = sorted((run / "checkpoints").iterdir())[-1]
    assert cli("export", checkpoint, "--output", tmp_path / "a.optg")[0] == 0
    young = tmp_path / "young"
    os.makedirs(young / "checkpoints")
    (young / "recipe.toml").write_text((run / "recipe.toml").read_text())
    (young / "checkpoints" / checkpoint.name).symlink_to(checkpoint)
    code, out, _ = cli("export", young / "checkpoints" / checkpoint.name)
    assert code == 0 and f"{young}/{checkpoint.name}.optg" in out
    a, b = (optg.load(path).state_dict() for path in (tmp_path / "a.optg", young / f"{checkpoint.name}.optg"))
    state = load_file(run / "model.safetensors")
    assert all(torch.equal(a[name], value) and torch.equal(b[name], value) for name, value in state.items())


def test_plain_tensors(run: Path, cli: Cli, tmp_path: Path) -> None:
    code, _, _ = cli("export", run, "--to", "safetensors", "--output", tmp_path / "plain.safetensors")
    found, state = load_file(tmp_path / "plain.safetensors"), load_file(run / "model.safetensors")
    assert code == 0 and found.keys() == state.keys() and all(torch.equal(found[name], state[name]) for name in state)
    with safe_open(tmp_path / "plain.safetensors", "pt") as file:
        assert json.loads(file.metadata()["optg"])["shape"] == [1, 8, 8]
    cli("export", run)
    assert cli("export", run / "model.optg", "--to", "safetensors")[0] == 0  # back from a packed file
    found = load_file(run / "model.dense.safetensors")
    assert found.keys() == state.keys() and all(torch.equal(found[name], state[name]) for name in state)


def test_onnx_is_checked_by_onnxruntime(run: Path, cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for package in ("onnx", "onnxscript", "onnxruntime"):
        pytest.importorskip(package)
    import onnxruntime

    code, out, err = cli("export", run, "--to", "onnx", "--output", tmp_path / "m.onnx")
    assert code == 0 and "onnxruntime's outputs differ by at most" in out and not err
    session = onnxruntime.InferenceSession(str(tmp_path / "m.onnx"))
    _, (images, _) = digits.load()
    outputs = session.run(None, {"images": images[:7].numpy()})[0]
    with torch.no_grad():
        assert np.allclose(outputs, export.open_trained(run).model(images[:7]), rtol=1e-5, atol=1e-5)
    assert cli("export", run, "--output", tmp_path / "m.optg")[0] == 0
    code, out, err = cli("export", tmp_path / "m.optg", "--to", "onnx", "--output", tmp_path / "packed.onnx")
    assert code == 0 and "onnxruntime's outputs differ by at most" in out and not err
    session = onnxruntime.InferenceSession(str(tmp_path / "packed.onnx"))
    assert np.allclose(session.run(None, {"images": images[:7].numpy()})[0], outputs, rtol=1e-5, atol=1e-5)
    for name in ("m.optg", "packed.onnx"):
        (tmp_path / name).unlink()
    before = (tmp_path / "m.onnx").read_bytes()
    monkeypatch.setattr(export, "to_onnx", lambda model, example, path: write_other(model, example, path))
    code, _, err = cli("export", run, "--to", "onnx", "--output", tmp_path / "m.onnx")
    assert code == 2 and "differ from torch's by" in err
    monkeypatch.setattr(export, "to_onnx", lambda model, example, path: write_other(model, example, path, torch.nan))
    code, _, err = cli("export", run, "--to", "onnx", "--output", tmp_path / "m.onnx")
    assert code == 2 and "differ from torch's by nan" in err
    assert (tmp_path / "m.onnx").read_bytes() == before and os.listdir(tmp_path) == ["m.onnx"]


def write_other(model: torch.nn.Module, example: torch.Tensor, path: Path, value: float = 0.0, to_onnx=export.to_onnx) -> None:
    """An ONNX file of a model that is not the one it is said to be."""
    other = torch.nn.Sequential(model, torch.nn.Threshold(0.1, value))
    to_onnx(other, example, path)


def test_missing_packages_are_named(run: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(export, "find_spec", lambda name: None)
    code, _, err = cli("export", run, "--to", "onnx")
    assert code == 2 and err == "optg: this needs onnx, onnxscript, onnxruntime; install with: pip install 'optg[onnx]'\n"


def test_wrong_use_gets_one_line(run: Path, cli: Cli, tmp_path: Path) -> None:
    cli("export", run)
    (tmp_path / "text").write_text("no model")
    (tmp_path / "damaged").write_bytes((run / "model.optg").read_bytes()[:-1])
    for args, message in (
        (("export", "nothing"), "there is no nothing"),
        (("export", tmp_path), "is neither the folder of a run"),
        (("export", tmp_path / "text"), "text: not a packed model"),
        (("export", run / "model.optg"), "is a packed file already"),
        (("export", run, "--output", tmp_path), "is a folder; expected a file"),
        (("export", run, "--to", "safetensors", "--output", run / "model.safetensors"), "is the run's own model"),
        (("export", run, "--output", tmp_path / "no" / "file"), "there is no folder"),
        (("export", run, "--to", "onnx", "--values", "bfloat16"), "is for --to packed"),
        (("predict", run), "give image files, or --data test"),
        (("predict", run, "a.png", "--data", "test"), "one of the two"),
        (("predict", run, "a.png"), "there is no image a.png"),
        (("predict", run, "text"), "text cannot be read as an image"),
        (("predict", run, "--data", "test", "--threads", "0"), "--threads is 0"),
        (("predict", tmp_path / "damaged", "--data", "test"), "damaged: the tensors take"),
    ):
        code, out, err = cli(*args)
        assert code == 2 and message in err and err.count("\n") == 1 and not out, (args, err)


# ---- inference


def test_images_are_named_and_the_test_set_is_counted(run: Path, cli: Cli, tmp_path: Path) -> None:
    cli("export", run)
    _, (images, _) = digits.read()
    for index in range(2):
        pixels = images[index, 0].numpy().astype(np.float64) * 255 / 16
        Image.fromarray(pixels.round().astype(np.uint8)).save(tmp_path / f"{index}.png")
    code, out, _ = cli("predict", run / "model.optg", "0.png", "1.png", "--threads", "1")
    lines = out.splitlines()
    assert code == 0 and len(lines) == 12 and [lines[0], lines[6]] == ["0.png", "1.png"]
    _, (seen, _) = digits.load()
    with torch.no_grad():
        shares = optg.load(run / "model.optg")(seen[:2]).softmax(1)
    for index, line in enumerate((lines[1], lines[7])):
        assert line.split()[1] == str(int(shares[index].argmax()))
        assert float(line.split()[0][:-1]) == pytest.approx(100 * float(shares[index].max()), abs=0.5)  # pixels were rounded

    accuracy = json.loads((run / "summary.json").read_text())["accuracy"]
    for what in (run, run / "model.optg"):
        code, out, _ = cli("predict", what, "--data", "test")
        assert code == 0 and f"accuracy {accuracy:.2%}  (360 images, " in out


def test_images_are_seen_as_in_training(tmp_path: Path) -> None:
    about = About("a", 10, (3, 4, 4), (0.5, 0.25, 0.0), (0.5, 1.0, 2.0), centre=0.5)
    pixels = np.zeros((8, 12, 3), np.uint8)
    pixels[2:6, 4:8] = (255, 51, 0)  # the middle square, of half the short side
    Image.fromarray(pixels).save(tmp_path / "a.png")
    found = infer.read(tmp_path / "a.png", about)
    torch.testing.assert_close(found, torch.tensor([1.0, -0.05, 0.0])[:, None, None].expand(3, 4, 4))
    grey = infer.read(tmp_path / "a.png", About("a", 10, (1, 2, 2), (0.0,), (1.0,)))
    assert grey.shape == (1, 2, 2)
    Image.fromarray(np.arange(64, dtype=np.uint16).reshape(8, 8) * 1000).save(tmp_path / "deep.png")
    with pytest.raises(ValueError, match=r"its pixels have more than 8 bits a channel \(mode I"):
        infer.read(tmp_path / "deep.png", about)
    with pytest.raises(ValueError, match="images of 5 channels"):
        infer.read(tmp_path / "a.png", About("a", 10, (5, 4, 4), (0.0,) * 5, (1.0,) * 5))


def test_a_file_cannot_name_code_as_its_data(run: Path, cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "evil.py").write_text("raise SystemExit('imported')")
    trained = export.open_trained(run)
    origin = {**trained.about.origin, "data": "evil:load"}
    packed.save(tmp_path / "m.optg", capture(trained.model, trained.example), replace(trained.about, origin=origin))
    code, _, err = cli("predict", "m.optg", "--data", "test")
    assert code == 2 and "the file says that its data is 'evil:load'; expected one of digits" in err


@pytest.mark.parametrize("name", ["digits", "cifar10", "cifar100", "imagenet", "synthetic"])
def test_preprocessing_is_that_of_the_data(name: str) -> None:
    shape = (1, 8, 8) if name == "digits" else (3, 32, 32)
    seen = export.seen_by(Recipe(data=name), shape)
    assert len(seen["mean"]) == len(seen["std"]) == shape[0] and all(0 < value < 1 for value in (*seen["mean"], *seen["std"]))
    if name in ("digits", "synthetic"):
        data = datasets.load(name, batch_size=2, device="cpu", seed=0)
        scale = 16 if name == "digits" else 255
        torch.testing.assert_close(torch.tensor(seen["mean"]) * scale, data.mean.flatten())
        torch.testing.assert_close(torch.tensor(seen["std"]) * scale, data.std.flatten())
    assert export.seen_by(Recipe(data="own.module:load"), shape) == {}


# ---- real images


def test_real_images_are_named_as_torch_names_them() -> None:
    folder = os.environ.get("OPTG_DATA")
    if not folder or not cifar.find(cifar.CIFARS["cifar10"], Path(folder)):
        pytest.skip("OPTG_DATA names no folder with CIFAR-10")
    images, _ = next(datasets.load("cifar10", folder, batch_size=64, device="cpu", seed=0).test())
    for name in ("vgg19", "resnet50", "mobilenet_v1"):
        model = sparse(name, 0.9)
        network = optg.compile(model, images[:1], threads=1)
        with torch.no_grad():
            expected, outputs = model(images), network(images)
        assert torch.equal(outputs.argmax(1), expected.argmax(1)), name
        assert float((outputs - expected).abs().max() / expected.abs().max()) < 1e-4, name
