"""Small datasets for tests, and helpers to load and compare them."""

import hashlib
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from optg.data import Data, cifar, load

Batches = list[tuple[Tensor, Tensor]]
COUNTS = {"cifar10": (100, 23), "cifar100": (90, 23)}  # training and test images of the small CIFARs


def md5(content: bytes) -> str:
    return hashlib.md5(content).hexdigest()


def cifar_rows(count: int, label_bytes: int, seed: int) -> bytes:
    made = np.random.RandomState(seed).randint(0, 256, (count, label_bytes + 3072)).astype(np.uint8)
    made[:, :label_bytes] = made[:, :label_bytes] % 10
    return made.tobytes()


def pickle_like_python2(rows: bytes, label_bytes: int, label_key: bytes, by_columns: bool = False) -> bytes:
    """Return a batch as Python 2 and the NumPy of its time pickled it, opcode by opcode."""
    table = np.frombuffer(rows, np.uint8).reshape(-1, label_bytes + 3072)
    labels = b"".join(b"K" + bytes([label]) for label in table[:, label_bytes - 1])
    pixels = table[:, label_bytes:].tobytes("F" if by_columns else "C")
    shape = b"M" + struct.pack("<H", len(table)) + b"M" + struct.pack("<H", 3072) + b"\x86"
    dtype = b"cnumpy\ndtype\nU\x02u1K\x00K\x01\x87R(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
    array = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85U\x01b\x87R(K\x01" + shape + dtype
    array += (b"\x88" if by_columns else b"\x89") + b"T" + struct.pack("<i", len(pixels)) + pixels + b"tb"
    key = b"U" + bytes([len(label_key)]) + label_key
    return b"\x80\x02}(U\x04data" + array + key + b"](" + labels + b"eu."


def write_form(folder: Path, form: cifar.Form, contents: list[bytes]) -> cifar.Form:
    """Write files with these contents, and return a form that expects them."""
    names = [*form.train, *form.test]
    (folder / form.folder).mkdir(parents=True)
    for name, content in zip(names, contents):
        (folder / form.folder / name).write_bytes(content)
    sums = dict(zip(names, map(md5, contents)))
    return replace(form, train={n: sums[n] for n in form.train}, test={n: sums[n] for n in form.test})


def write_picture(path: Path, colour: int, size: tuple[int, int] = (50, 40)) -> None:
    """Write a smooth image, which JPEG preserves, with its class in the red channel."""
    across, down = np.meshgrid(np.linspace(0, 255, size[0]), np.linspace(0, 255, size[1]))
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.stack([np.full_like(across, colour), across, down], 2).astype(np.uint8)).save(path)


def load_small(folder: Path, name: str, **options: Any) -> Data:
    return load(name, folder, **{"batch_size": 8, "device": "cpu", "seed": 3, "workers": 0} | options)


def equal_batches(a: Batches, b: Batches) -> bool:
    return len(a) == len(b) and all(torch.equal(x, u) and torch.equal(y, v) for (x, y), (u, v) in zip(a, b))
