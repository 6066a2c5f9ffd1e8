"""ImageNet, or any images in folders train/CLASS and val/CLASS, decoded by worker processes as they are needed.

Training sees random resized crops and flips (Szegedy et al. 2015), testing the centre: resized to 256 and cut to 224. An
image that cannot be read is named in a warning, and the next of the order takes its place.
"""

import math
import os
import random
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from optg.data.augment import normalise
from optg.data.base import Batch, Data, Request, shuffled
from optg.machine import cores

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
EXTENSIONS = (".jpeg", ".jpg", ".png", ".webp", ".bmp", ".gif", ".ppm", ".pgm", ".tif", ".tiff")
CENTRE = 224 / 256  # of the short side is what a test sees
TRIES = 100  # images in a row that may be unreadable; more, and it is the disk that fails

Key = tuple[int | None, int, int]  # epoch, or None to test; position in its order; image
Decoded = tuple[Tensor, Tensor, dict[str, str]]  # images, uint8; labels; the paths that could not be read, and why
Box = tuple[float, float, float, float]  # left, top, right, bottom


def serve(request: Request) -> Data:
    return ImageNet(request, *scan(request.folder), size=request.size or 224)


@dataclass
class Files:
    """The images of one split, in a form that is small and that forked workers share: two arrays, no object for each."""

    folder: str
    names: np.ndarray  # bytes, relative to the folder
    labels: np.ndarray

    def __len__(self) -> int:
        return len(self.names)

    def path(self, image: int) -> str:
        return os.path.join(self.folder, os.fsdecode(self.names[image]))


def scan(folder: Path) -> tuple[list[str], Files, Files]:
    """The classes, and the images for training and for testing."""
    places = (folder, folder / "imagenet")
    root = next((place for place in places if (place / "train").is_dir() and (place / "val").is_dir()), None)
    if root is None:
        raise FileNotFoundError(f"there is no train and val in {folder}; put train/CLASS/*.JPEG and val/CLASS/*.JPEG there")
    train, val = subfolders(root / "train"), subfolders(root / "val")
    if odd := sorted(set(train) ^ set(val)):
        lacking, having = ("val", "train") if odd[0] in train else ("train", "val")
        more = f" (and {len(odd) - 1} more differ)" if len(odd) > 1 else ""
        raise ValueError(f"{root / lacking} lacks the class {odd[0]} of {having}{more}; expected the same classes in both")
    return train, gather(root / "train", train), gather(root / "val", val)


def subfolders(folder: Path) -> list[str]:
    names = sorted(entry.name for entry in os.scandir(folder) if entry.is_dir() and not entry.name.startswith("."))
    if not names:
        raise ValueError(f"{folder} has no folders; expected one for each class, with its images")
    return names


def gather(folder: Path, classes: list[str]) -> Files:
    names: list[bytes] = []
    labels: list[int] = []
    for label, name in enumerate(classes):
        found = []
        for at, _, files in os.walk(folder / name, followlinks=True):
            below = os.path.relpath(at, folder)
            found += [os.fsencode(os.path.join(below, file)) for file in files if is_image(file)]
        if not found:
            raise ValueError(f"{folder / name} has no images; expected files such as *.JPEG or *.png")
        names += sorted(found)
        labels += [label] * len(found)
    return Files(str(folder), np.array(names), np.array(labels))


def is_image(name: str) -> bool:
    return name.lower().endswith(EXTENSIONS) and not name.startswith(".")


class ImageNet(Data):
    def __init__(self, request: Request, classes: list[str], train: Files, val: Files, size: int) -> None:
        super().__init__(request, len(classes), (3, size, size), (len(train), len(val)))
        self.mean, self.std = (255 * torch.tensor(values, device=request.device)[:, None, None] for values in (MEAN, STD))
        self.training, self.testing = Pool(train, size, request), Pool(val, size, request)

    @property
    def skipped(self) -> int:
        return len(self.training.unreadable) + len(self.testing.unreadable)

    def train(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        order, steps = shuffled(self.sizes[0], self.request.seed, epoch), self.steps(start)

        def keys(rows: slice) -> list[Key]:
            return [(epoch, rows.start + i, image) for i, image in enumerate(order[rows].tolist())]

        return self.batches(self.training, (keys(self.train_rows(step)) for step in steps))

    def test(self) -> Iterator[Batch]:
        parts = (range(rows.start, rows.stop) for rows in self.test_rows())
        return self.batches(self.testing, ([(None, image, image) for image in part] for part in parts))

    def batches(self, pool: "Pool", keys: Iterable[list[Key]]) -> Iterator[Batch]:
        device = self.request.device
        for images, labels in pool.decode(keys):
            # Bytes travel, a quarter of the floats; from pinned memory, so that the host does not wait for them.
            yield normalise(images.to(device, non_blocking=True), self.mean, self.std), labels.to(device, non_blocking=True)


class Pool:
    """Processes that decode the images of one split, and stay from epoch to epoch. They start with the first batch."""

    def __init__(self, files: Files, size: int, request: Request) -> None:
        self.unreadable: set[str] = set()
        self.schedule = Schedule()
        workers = min(8, cores()) if request.workers is None else request.workers
        self.loader = DataLoader(
            Decoder(files, size, request.seed, request.augment),
            batch_sampler=self.schedule,
            collate_fn=as_it_is,
            num_workers=workers,
            persistent_workers=workers > 0,
            pin_memory=request.device.type == "cuda",
            generator=torch.Generator(),  # its own: otherwise each pass would draw from the global one
        )

    def decode(self, keys: Iterable[list[Key]]) -> Iterator[Batch]:
        """Images, as bytes, and labels: a batch for each list of keys."""
        self.schedule.keys = keys
        for images, labels, unreadable in self.loader:
            for path in unreadable.keys() - self.unreadable:
                self.unreadable.add(path)
                warnings.warn(f"{path} cannot be read ({unreadable[path]}); the next image takes its place", stacklevel=2)
            yield images, labels
            if self.schedule.keys is not keys:  # the workers have left this pass for the other
                raise RuntimeError("another pass over these images began before this one ended; go through one at a time")


class Schedule:
    """The batches of the pass that comes next. A loader cannot be given others, but these can change."""

    keys: Iterable[list[Key]] = ()

    def __iter__(self) -> Iterator[list[Key]]:
        return iter(self.keys)


def as_it_is(batch: Any) -> Any:  # a lambda could not be sent to a worker
    return batch


class Decoder(Dataset):
    """Makes batches of keys, in a worker process."""

    def __init__(self, files: Files, size: int, seed: int, augment: bool) -> None:
        self.files, self.size, self.seed, self.augment = files, size, seed, augment

    def __getitems__(self, keys: list[Key]) -> Decoded:
        images = torch.empty(len(keys), 3, self.size, self.size, dtype=torch.uint8)
        labels = torch.empty(len(keys), dtype=torch.int64)
        unreadable: dict[str, str] = {}
        for row, key in enumerate(keys):
            for image in islice(self.candidates(key), TRIES):
                path = self.files.path(image)
                try:
                    images[row], labels[row] = read(path, self.size, self.chance(key)), int(self.files.labels[image])
                    break
                except Exception as error:  # Pillow's decoders raise all sorts
                    unreadable[path] = f"{type(error).__name__}: {error}"
            else:
                raise OSError(f"{path} cannot be read, nor the images before it ({unreadable[path]}); is the disk still there?")
        return images, labels, unreadable

    def candidates(self, key: Key) -> Iterator[int]:
        """The image that is meant, then those after it in the order."""
        epoch, position, image = key
        yield image
        count = len(self.files)
        order = range(count) if epoch is None else shuffled(count, self.seed, epoch).tolist()  # only now: it is long
        for step in range(1, count):
            yield order[(position + step) % count]

    def chance(self, key: Key) -> random.Random | None:
        epoch, position, _ = key
        return random.Random(f"{self.seed} {epoch} {position}") if self.augment and epoch is not None else None


def read(path: str, size: int, chance: random.Random | None) -> Tensor:
    """An image as uint8 [3, size, size]: a random part of it, or its centre."""
    with Image.open(path) as image:
        box = random_box(*image.size, chance) if chance else centre_box(*image.size)
        pixels = np.asarray(image.convert("RGB").resize((size, size), Image.Resampling.BILINEAR, box))
    if chance and chance.random() < 0.5:
        pixels = pixels[:, ::-1]
    return torch.from_numpy(np.array(pixels.transpose(2, 0, 1), order="C"))


def centre_box(width: int, height: int) -> Box:
    """What resizing the short side to 256 and cutting out the middle 224×224 would leave; of other sizes in proportion."""
    side = CENTRE * min(width, height)
    return (width - side) / 2, (height - side) / 2, (width + side) / 2, (height + side) / 2


def random_box(width: int, height: int, chance: random.Random) -> Box:
    """8 to 100 % of the area, 3:4 to 4:3, anywhere; after ten that do not fit, the largest such box at the centre."""
    for _ in range(10):
        area, ratio = width * height * chance.uniform(0.08, 1), math.exp(chance.uniform(math.log(3 / 4), math.log(4 / 3)))
        w, h = math.sqrt(area * ratio), math.sqrt(area / ratio)
        if w <= width and h <= height:
            left, top = chance.uniform(0, width - w), chance.uniform(0, height - h)
            return left, top, min(left + w, width), min(top + h, height)
    w, h = min(width, height * 4 / 3), min(height, width * 4 / 3)
    return (width - w) / 2, (height - h) / 2, (width + w) / 2, (height + h) / 2
