"""CIFAR-10 and CIFAR-100 (Krizhevsky 2009): 50,000 and 10,000 colour images of 32×32, https://www.cs.toronto.edu/~kriz/cifar.html.

Both official forms are accepted, in the folder or one level below, and each file is checked by its md5. If neither is there,
the binary form is downloaded. The python form is pickled; no code in it is run.
"""

import fcntl
import hashlib
import io
import os
import pickle
import shutil
import sys
import tarfile
import tempfile
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import Any

import numpy as np
import torch

from optg.data.base import Data, Request
from optg.data.memory import InMemory, Split, Tensors

PIXELS = 3 * 32 * 32  # the red, green and blue planes, row by row


@dataclass(frozen=True)
class Form:
    """A form in which a CIFAR is published: a folder, and the md5 of each file."""

    folder: str
    train: dict[str, str]
    test: dict[str, str]


@dataclass(frozen=True)
class Cifar:
    title: str
    classes: int
    mean: tuple[float, ...]  # one per channel, over the training images, for pixels from 0 to 1
    std: tuple[float, ...]
    label_bytes: int  # before the pixels of an image in a binary file; the last one is the class
    label_key: bytes  # key of the classes in a python file
    binary: Form
    python: Form
    archive: str  # address of the binary form
    archive_md5: str


CIFARS = {
    "cifar10": Cifar(
        title="CIFAR-10",
        classes=10,
        mean=(0.4914, 0.4822, 0.4465),
        std=(0.2470, 0.2435, 0.2616),
        label_bytes=1,
        label_key=b"labels",
        binary=Form(
            folder="cifar-10-batches-bin",
            train={
                "data_batch_1.bin": "5dd7e06a14cb22eb9f671a540d1b7c25",
                "data_batch_2.bin": "5ea93a67294ea407fff1d09f752e9692",
                "data_batch_3.bin": "942cd6a4bcdd0dd3c604fbe906cb4421",
                "data_batch_4.bin": "ae636b3ba5c66a11e91e8cb52e771fcb",
                "data_batch_5.bin": "53f37980c15c3d472c316c40844f3f0d",
            },
            test={"test_batch.bin": "803d5f7f4d78ea53de84dbe85f74fb6d"},
        ),
        python=Form(
            folder="cifar-10-batches-py",
            train={
                "data_batch_1": "c99cafc152244af753f735de768cd75f",
                "data_batch_2": "d4bba439e000b95fd0a9bffe97cbabec",
                "data_batch_3": "54ebc095f3ab1f0389bbae665268c751",
                "data_batch_4": "634d18415352ddfa80567beed471001a",
                "data_batch_5": "482c414d41f54cd18b22e5b47cb7c3cb",
            },
            test={"test_batch": "40351d587109b95175f43aff81a1287e"},
        ),
        archive="https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",
        archive_md5="c32a1d4ab5d03f1284b67883e8d87530",
    ),
    "cifar100": Cifar(
        title="CIFAR-100",
        classes=100,
        mean=(0.5071, 0.4865, 0.4409),
        std=(0.2673, 0.2564, 0.2762),
        label_bytes=2,  # the first is one of 20 coarse classes
        label_key=b"fine_labels",
        binary=Form(
            folder="cifar-100-binary",
            train={"train.bin": "6172c7755cfe09b2fe270c85cebc1b15"},
            test={"test.bin": "4499cfba6c016c1be1438163640a0898"},
        ),
        python=Form(
            folder="cifar-100-python",
            train={"train": "16019d7e3df5f24257cddd939b257f8d"},
            test={"test": "f0ef6b0ae62326f3e7ffdfab6717acfc"},
        ),
        archive="https://www.cs.toronto.edu/~kriz/cifar-100-binary.tar.gz",
        archive_md5="03b5dce01913d631647c71ecec9e9cb8",
    ),
}


def serve(request: Request) -> Data:
    cifar = CIFARS[request.name]
    form, place = find(cifar, request.folder) or download_once(cifar, request.folder)
    train, test = (read_files(cifar, form, place, files) for files in (form.train, form.test))
    mean, std = ([255 * value for value in values] for values in (cifar.mean, cifar.std))
    return InMemory(request, Tensors(train, test, cifar.classes, mean, std, pad=4))


def find(cifar: Cifar, folder: Path) -> tuple[Form, Path] | None:
    """Return the first complete form and its folder, or None if there is no file of any form."""
    missing = []
    for form, place in candidates(cifar, folder):
        absent = [name for name in (*form.train, *form.test) if not (place / name).is_file()]
        if not absent:
            return form, place
        missing.append(f"{place} lacks {', '.join(absent)}")
    if missing:
        raise FileNotFoundError(
            f"{cifar.title} is incomplete: {'; '.join(missing)}. Put these files there, or remove that folder"
        )
    return None


def candidates(cifar: Cifar, folder: Path) -> Iterator[tuple[Form, Path]]:
    below = sorted(path for path in folder.iterdir() if path.is_dir()) if folder.is_dir() else []
    for place in (folder, *below):
        for form in (cifar.binary, cifar.python):
            if (place / form.folder).is_dir():
                yield form, place / form.folder


def read_files(cifar: Cifar, form: Form, place: Path, files: dict[str, str]) -> Split:
    """Return the images and labels of these files, in order."""
    splits = []
    for name, md5 in files.items():
        content = (place / name).read_bytes()
        if (found := hashlib.md5(content, usedforsecurity=False).hexdigest()) != md5:
            raise ValueError(
                f"{place / name} is damaged: its md5 is {found}, expected {md5}. Put {cifar.title}'s official file there, "
                f"or remove {place} to have it downloaded"
            )
        parse = parse_binary if form is cifar.binary else parse_python
        try:
            splits.append(parse(cifar, content))
        except Exception as error:  # unpickling can raise anything
            raise ValueError(f"{place / name} is not a file of {cifar.title}: {error}") from error
    images, labels = zip(*splits)
    pixels = torch.from_numpy(np.concatenate(images)).reshape(-1, 3, 32, 32)
    return pixels, torch.from_numpy(np.concatenate(labels))


Arrays = tuple[np.ndarray, np.ndarray]  # pixels [N, 3072], uint8; labels [N], int64


def parse_binary(cifar: Cifar, content: bytes) -> Arrays:
    rows = np.frombuffer(content, np.uint8).reshape(-1, cifar.label_bytes + PIXELS)
    return rows[:, cifar.label_bytes :], rows[:, cifar.label_bytes - 1].astype(np.int64)


def parse_python(cifar: Cifar, content: bytes) -> Arrays:
    batch = InertUnpickler(io.BytesIO(content), encoding="bytes").load()
    _, shape, _, by_columns, pixels = batch[b"data"].state  # the pickled state of a NumPy array
    rows = np.frombuffer(pixels, np.uint8).reshape(shape, order="F" if by_columns else "C")
    return rows.reshape(-1, PIXELS), np.array(batch[cifar.label_key], np.int64)


class InertUnpickler(pickle.Unpickler):
    """Read plain values, and NumPy arrays as `PickledState`. Nothing that the file names is called."""

    def find_class(self, module: str, name: str) -> Any:
        if f"{module}.{name}" not in ("numpy.core.multiarray._reconstruct", "numpy.ndarray", "numpy.dtype"):
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which is not allowed and was not run")
        return PickledState


class PickledState:
    """Stand-in for an object that keeps its pickled state."""

    state: Any = None

    def __init__(self, *args: Any) -> None:
        self.args = args

    def __setstate__(self, state: Any) -> None:
        self.state = state


def download_once(cifar: Cifar, folder: Path) -> tuple[Form, Path]:
    """Download the binary form. If several processes need it, one downloads and the others wait."""
    new, place, names = not folder.exists(), folder / cifar.binary.folder, [*cifar.binary.train, *cifar.binary.test]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with locked(folder):
            return find(cifar, folder) or (cifar.binary, download(cifar, place, names))
    except (OSError, HTTPException, tarfile.TarError, ValueError) as error:
        if new and folder.is_dir() and not any(folder.iterdir()):
            folder.rmdir()
        raise FileNotFoundError(
            f"{cifar.title} is not in {folder} and could not be downloaded ({error}). Put {', '.join(names)} into "
            f"{place}, from {cifar.archive}, or the files of the python version into {folder / cifar.python.folder}"
        ) from error


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Lock the folder against other processes. The kernel releases the lock when the process exits."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):  # some network disks cannot lock: then each process downloads, and the first result is used
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def download(cifar: Cifar, place: Path, names: list[str]) -> Path:
    """Download the official binary files into their folder: all of them, or none."""
    print(f"Downloading {cifar.archive} to {place.parent} ...", file=sys.stderr)
    with tempfile.TemporaryDirectory(prefix=".download-", dir=place.parent) as temporary:
        archive, extracted = Path(temporary, "archive"), Path(temporary, "extracted")
        fetch(cifar.archive, archive)
        extract(archive, cifar.archive_md5, [f"{cifar.binary.folder}/{name}" for name in names], extracted)
        try:
            os.rename(extracted, place)
        except OSError:
            if not place.is_dir():  # otherwise another process was faster
                raise
    return place


def fetch(url: str, path: Path) -> None:
    with urllib.request.urlopen(url, timeout=30) as response, path.open("wb") as file:
        shutil.copyfileobj(response, file)


def extract(archive: Path, md5: str, members: list[str], destination: Path) -> None:
    """Extract only these files of an archive into a new folder, without their paths."""
    with archive.open("rb") as file:
        if (found := hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()) != md5:
            raise ValueError(f"the md5 of the download is {found}, expected {md5}")
    destination.mkdir()
    with tarfile.open(archive, "r:gz") as tar:
        for name in members:
            try:
                source = tar.extractfile(name)
            except KeyError:
                source = None
            if source is None:
                raise ValueError(f"the archive has no file {name}")
            with source, (destination / Path(name).name).open("wb") as file:
                shutil.copyfileobj(source, file)
