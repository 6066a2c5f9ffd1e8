from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from PIL import Image

from optg.data import Data, cifar
from tests.data.small_data import COUNTS, cifar_rows, load_small, write_form, write_picture


@pytest.fixture
def small_cifars(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with binary CIFARs of a few random images, which the library accepts as the official ones."""
    for name, (train, test) in COUNTS.items():
        kind = cifar.CIFARS[name]
        parts = [train // len(kind.binary.train)] * len(kind.binary.train) + [test]
        contents = [cifar_rows(count, kind.label_bytes, seed) for seed, count in enumerate(parts)]
        monkeypatch.setitem(
            cifar.CIFARS, name, replace(kind, binary=write_form(tmp_path, kind.binary, contents), archive="file:///none")
        )
    return tmp_path


@pytest.fixture
def photo_folders(tmp_path: Path) -> Path:
    """Three classes told apart by their red, with 7 training and 3 test images each; one image is grey, one has alpha."""
    for label, name in enumerate(("ant", "bee", "cat")):
        for split, count in (("train", 7), ("val", 3)):
            for i in range(count):
                write_picture(
                    tmp_path / split / name / f"{i}.{('JPEG', 'png', 'webp')[i % 3]}", 100 * label, (50 + i, 40 - 3 * i)
                )
    grey = Image.open(tmp_path / "train" / "ant" / "0.JPEG").getchannel(0)
    grey.save(tmp_path / "train" / "ant" / "0.JPEG")
    bee = Image.open(tmp_path / "train" / "bee" / "1.png")
    bee.putalpha(50)
    bee.save(tmp_path / "train" / "bee" / "1.png")
    return tmp_path


@pytest.fixture(params=["digits", "cifar10", "cifar100", "synthetic", "imagenet"])
def make_data(request: pytest.FixtureRequest) -> Callable[..., Data]:
    """A function that loads each dataset in turn with the given options."""
    name = request.param
    folder = request.getfixturevalue(
        {"cifar10": "small_cifars", "cifar100": "small_cifars", "imagenet": "photo_folders"}.get(name, "tmp_path")
    )
    size = {"size": 16} if name == "imagenet" else {}
    return lambda **options: load_small(folder, name, **size | options)
