"""`optg predict`. Set OPTG_DATA to a folder with CIFAR-10 for a test on real images."""

import json
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import optg
from optg import data as datasets
from optg.data import cifar, digits
from optg.deploy.export import open_trained
from optg.deploy.graph import capture
from optg.deploy.packed import About, write_packed
from optg.deploy.predict import read_normalised_image
from tests.deploy.conftest import Cli
from tests.deploy.nets import sparse


def test_image_files_and_test_images_are_classified(trained_run: Path, cli: Cli, tmp_path: Path) -> None:
    cli("export", trained_run)
    _, (images, _) = digits.read()
    for index in range(2):
        pixels = images[index, 0].numpy().astype(np.float64) * 255 / 16
        Image.fromarray(pixels.round().astype(np.uint8)).save(tmp_path / f"{index}.png")
    code, out, _ = cli("predict", trained_run / "model.optg", "0.png", "1.png", "--threads", "1")
    lines = out.splitlines()
    assert code == 0 and len(lines) == 12 and [lines[0], lines[6]] == ["0.png", "1.png"]
    _, (seen, _) = digits.load()
    with torch.no_grad():
        shares = optg.load(trained_run / "model.optg")(seen[:2]).softmax(1)
    for index, line in enumerate((lines[1], lines[7])):
        assert line.split()[1] == str(int(shares[index].argmax()))
        assert float(line.split()[0][:-1]) == pytest.approx(100 * float(shares[index].max()), abs=0.5)  # pixels were rounded

    accuracy = json.loads((trained_run / "summary.json").read_text())["accuracy"]
    for what in (trained_run, trained_run / "model.optg"):
        code, out, _ = cli("predict", what, "--data", "test")
        assert code == 0 and f"accuracy {accuracy:.2%}  (360 images, " in out


def test_wrong_arguments_give_a_one_line_error(trained_run: Path, cli: Cli, tmp_path: Path) -> None:
    cli("export", trained_run)
    (tmp_path / "text").write_text("no model")
    (tmp_path / "folder").mkdir()
    (tmp_path / "damaged").write_bytes((trained_run / "model.optg").read_bytes()[:-1])
    for args, message in (
        (("predict", trained_run), "give either image files, or --data test"),
        (("predict", trained_run, "a.png", "--data", "test"), "give either image files, or --data test"),
        (("predict", trained_run, "a.png"), "there is no image a.png"),
        (("predict", trained_run, "folder"), "folder is not a file; expected an image"),
        (("predict", trained_run, "text"), "text cannot be read as an image"),
        (("predict", trained_run, "--data", "test", "--threads", "0"), "--threads is 0"),
        (("predict", tmp_path / "damaged", "--data", "test"), "damaged: the tensors take"),
    ):
        code, out, err = cli(*args)
        assert code == 2 and message in err and err.count("\n") == 1 and not out, (args, err)


def test_images_are_preprocessed_as_in_training(tmp_path: Path) -> None:
    about = About("a", 10, (3, 4, 4), (0.5, 0.25, 0.0), (0.5, 1.0, 2.0), centre=0.5)
    pixels = np.zeros((8, 12, 3), np.uint8)
    pixels[2:6, 4:8] = (255, 51, 0)  # the middle square, of half the short side
    Image.fromarray(pixels).save(tmp_path / "a.png")
    found = read_normalised_image(tmp_path / "a.png", about)
    torch.testing.assert_close(found, torch.tensor([1.0, -0.05, 0.0])[:, None, None].expand(3, 4, 4))
    grey = read_normalised_image(tmp_path / "a.png", About("a", 10, (1, 2, 2), (0.0,), (1.0,)))
    assert grey.shape == (1, 2, 2)
    Image.fromarray(np.arange(64, dtype=np.uint16).reshape(8, 8) * 1000).save(tmp_path / "deep.png")
    with pytest.raises(ValueError, match=r"it has more than 8 bits per channel \(mode I"):
        read_normalised_image(tmp_path / "deep.png", about)
    with pytest.raises(ValueError, match="images of 5 channels"):
        read_normalised_image(tmp_path / "a.png", About("a", 10, (5, 4, 4), (0.0,) * 5, (1.0,) * 5))


def test_packed_file_cannot_name_code_as_its_dataset(trained_run: Path, cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "evil.py").write_text("raise SystemExit('imported')")
    trained = open_trained(trained_run)
    origin = {**trained.about.origin, "data": "evil:load"}
    write_packed(tmp_path / "m.optg", capture(trained.model, trained.example), replace(trained.about, origin=origin))
    code, _, err = cli("predict", "m.optg", "--data", "test")
    assert code == 2 and "the file names the dataset 'evil:load'; expected one of digits" in err


def test_real_images_are_classified_as_in_torch() -> None:
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
