"""Whole runs on image folders, and on the real CIFAR-10 if the folder OPTG_DATA holds it."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from optg.data import cifar
from optg.training.checkpoint import list_checkpoints, load
from tests.cli.calling import call


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Two classes in ImageNet's folder layout. One of the five training files is not an image."""
    random = np.random.RandomState(0)
    for name in ("train/cat/0", "train/cat/1", "train/dog/0", "train/dog/1", "val/cat/0", "val/dog/0"):
        path = tmp_path / "photos" / f"{name}.JPEG"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(random.randint(0, 256, (60, 80, 3)).astype(np.uint8)).save(path)
    (tmp_path / "photos" / "train" / "cat" / "broken.JPEG").write_bytes(b"\xff\xd8\xff no image")
    return tmp_path / "photos"


@pytest.mark.parametrize("model, parameters, mega", [("resnet50", 23_512_130, 4087), ("mobilenet_v1", 3_209_026, 568)])
def test_recipes_train_on_imagenets_folder_layout(photos, tmp_path, monkeypatch, capsys, model, parameters, mega):
    options = ["--folder", str(photos), "--batch-size", "2", "--epochs", "2", "--no-compile", "--output", str(tmp_path / "run")]
    with pytest.warns(UserWarning, match=r"train/cat/broken.JPEG cannot be read .* takes its place"):
        call(monkeypatch, "train", "--recipe", f"{model}-imagenet", *options, "--device", "cpu")
    said, summary = capsys.readouterr().out, json.loads((tmp_path / "run" / "summary.json").read_text())
    assert "epoch 2/2" in said and "unreadable images: 1" in said
    assert summary["unreadable"] == 1 and (summary["classes"], summary["shape"]) == (2, [3, 224, 224])
    assert summary["parameters"] == parameters and round(summary["dense_flops"] / 1e6) == mega
    assert summary["sparsity"] == pytest.approx(summary["settings"]["sparsity"], abs=1e-6)
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [2, 4] and all(row["loss"] > 0 for row in rows)
    assert (tmp_path / "run" / "model.safetensors").is_file()


def test_vgg19_learns_from_the_real_cifar(tmp_path):
    """Train the first steps of the paper's recipe in small batches, then stop. Takes a minute on two cores."""
    folder, run = os.environ.get("OPTG_DATA"), tmp_path / "run"
    if not folder or not cifar.find(cifar.CIFARS["cifar10"], Path(folder)):
        pytest.skip("set OPTG_DATA to a folder that holds CIFAR-10")
    options = ["--recipe", "vgg19-cifar10", "--folder", folder, "--batch-size", "32", "--lr", "0.02", "--minutes", "0.2"]
    options += ["--precision", "float32", "--no-compile", "--device", "cpu"]  # bfloat16 takes minutes on some CPUs
    command = [sys.executable, "-m", "optg", "train", *options, "--output", str(run)]
    process = subprocess.Popen(command, cwd=Path(__file__).parents[2], stderr=subprocess.PIPE, text=True)
    while process.poll() is None and not any(int(path.name[5:]) >= 40 for path in list_checkpoints(run / "checkpoints")):
        time.sleep(0.1)
    process.terminate()
    _, said = process.communicate()
    assert process.returncode == 143 and "To continue, give the same command again." in said, said
    losses = load(list_checkpoints(run / "checkpoints")[-1])[0]["epoch.losses"]
    assert losses[-10:].mean() < 0.95 * losses[:10].mean()
