"""ImageNet, or any images in folders train/CLASS and val/CLASS, decoded on the fly by worker processes.

Training uses random resized crops and flips (Szegedy et al. 2015); testing uses the centre: resize to 256, crop to 224. An
image that cannot be read is reported in a warning and replaced by the next one in the order.
"""

import math
import os
import random
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from optg.data.augment import normalise
from optg.data.base import Batch, Data, Request, last_tenth, shuffled
from optg.data.images import find_images, inode, open_image
from optg.machine import cores

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
CENTRE = 224 / 256  # share of the short side that test images keep
TRIES = 100  # unreadable images in a row before the disk is assumed to fail

Key = tuple[int | None, int, int]  # epoch, or None for testing; position in the order; image
Decoded = tuple[Tensor, Tensor, dict[str, str]]  # uint8 images; labels; unreadable paths with the reason
Box = tuple[float, float, float, float]  # left, top, right, bottom


def serve(request: Request) -> Data:
    import_module("PIL.Image")  # without Pillow, fail here and not at every image
    return ImageNet(request, *scan(request.folder), size=request.size or 224)


@dataclass
class Files:
    """The images of one split as two arrays, which are small and shared by forked workers."""

    folder: str
    names: np.ndarray  # bytes, relative to the folder
    labels: np.ndarray

    def __len__(self) -> int:
        return len(self.names)

    def only(self, chosen: np.ndarray) -> "Files":
        return Files(self.folder, self.names[chosen], self.labels[chosen])

    def path(self, image: int) -> str:
        return os.path.join(self.folder, os.fsdecode(self.names[image]))


def scan(folder: Path) -> tuple[list[str], Files, Files]:
    """Return the classes, and the images for training and for testing."""
    places = (folder, folder / "imagenet")
    root = next((place for place in places if (place / "train").is_dir() and (place / "val").is_dir()), None)
    if root is None:
        raise FileNotFoundError(f"{folder} has no train and val folders; put train/CLASS/*.JPEG and val/CLASS/*.JPEG there")
    train, val = subfolders(root / "train"), subfolders(root / "val")
    if unmatched := sorted(set(train) ^ set(val)):
        lacking, having = ("val", "train") if unmatched[0] in train else ("train", "val")
        more = f" (and {len(unmatched) - 1} more differ)" if len(unmatched) > 1 else ""
        raise ValueError(
            f"{root / lacking} lacks the class {unmatched[0]} of {having}{more}; expected the same classes in both"
        )
    return train, gather(root / "train", train), gather(root / "val", val)


def subfolders(folder: Path) -> list[str]:
    names = sorted(entry.name for entry in os.scandir(folder) if entry.is_dir() and not entry.name.startswith("."))
    if not names:
        raise ValueError(f"{folder} has no folders; expected one per class, with its images")
    return names


def gather(folder: Path, classes: list[str]) -> Files:
    names: list[bytes] = []
    labels: list[int] = []
    others = {inode(folder), *(inode(folder / name) for name in classes)}  # a link to another class would change labels
    for label, name in enumerate(classes):
        found = [os.fsencode(os.path.join(name, path)) for path in find_images(folder / name, others)]
        if not found:
            raise ValueError(f"{folder / name} has no images; expected files such as *.JPEG or *.png")
        names += sorted(found)
        labels += [label] * len(found)
    return Files(str(folder), np.array(names), np.array(labels))


class ImageNet(Data):
    def __init__(self, request: Request, classes: list[str], train: Files, val: Files, size: int) -> None:
        held = last_tenth(torch.from_numpy(train.labels), by_class=True).numpy() & request.validate
        train, held_out = train.only(~held), train.only(held)
        super().__init__(request, len(classes), (3, size, size), (len(train), len(val)), len(held_out))
        self.mean, self.std = (255 * torch.tensor(values, device=request.device)[:, None, None] for values in (MEAN, STD))
        self.training, self.testing = DecoderPool(train, size, request), DecoderPool(val, size, request)
        self.validating = DecoderPool(held_out, size, request)

    @property
    def skipped(self) -> int:
        return sum(len(pool.unreadable) for pool in (self.training, self.testing, self.validating))

    def train(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        order, steps = shuffled(self.sizes[0], self.request.seed, epoch), self.steps(start)

        def keys(rows: slice) -> list[Key]:
            return [(epoch, rows.start + i, image) for i, image in enumerate(order[rows].tolist())]

        return self.batches(self.training, (keys(self.train_rows(step)) for step in steps))

    def test(self) -> Iterator[Batch]:
        return self.in_order(self.testing, self.sizes[1])

    def validation(self) -> Iterator[Batch]:
        return self.in_order(self.validating, self.held_out)

    def in_order(self, pool: "DecoderPool", size: int) -> Iterator[Batch]:
        parts = (range(rows.start, rows.stop) for rows in self.test_rows(size))
        return self.batches(pool, ([(None, image, image) for image in part] for part in parts))

    def batches(self, pool: "DecoderPool", keys: Iterable[list[Key]]) -> Iterator[Batch]:
        device = self.request.device
        for images, labels in pool.decode(keys):
            # Send bytes, a quarter of the size of floats, and from pinned memory, so that the host does not wait.
            yield normalise(images.to(device, non_blocking=True), self.mean, self.std), labels.to(device, non_blocking=True)


class DecoderPool:
    """Processes that decode the images of one split. They start with the first batch and live for all epochs."""

    def __init__(self, files: Files, size: int, request: Request) -> None:
        self.unreadable: set[str] = set()
        self.sampler = PassSampler()
        workers = min(8, cores()) if request.workers is None else request.workers
        self.loader = DataLoader(
            Decoder(files, size, request.seed, request.augment),
            batch_sampler=self.sampler,
            collate_fn=identity,
            num_workers=workers,
            persistent_workers=workers > 0,
            pin_memory=request.device.type == "cuda",
            generator=torch.Generator(),  # without its own, each pass would draw from the global one
        )

    def decode(self, keys: Iterable[list[Key]]) -> Iterator[Batch]:
        """Yield images (uint8) and labels, one batch per list of keys."""
        self.sampler.keys = keys
        for images, labels, unreadable in self.loader:
            for path in unreadable.keys() - self.unreadable:
                self.unreadable.add(path)
                warnings.warn(f"{path} cannot be read ({unreadable[path]}); the next image takes its place", stacklevel=2)
            yield images, labels
            if self.sampler.keys is not keys:  # the workers now serve another pass
                raise RuntimeError("another pass over these images began before this one ended; run one pass at a time")


class PassSampler:
    """The batches of the next pass. A DataLoader cannot change its sampler, but a sampler can change its batches."""

    keys: Iterable[list[Key]] = ()

    def __iter__(self) -> Iterator[list[Key]]:
        return iter(self.keys)


def identity(batch: Any) -> Any:  # a lambda cannot be sent to a worker
    return batch


class Decoder(Dataset):
    """Turn lists of keys into batches, in a worker process."""

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
                    images[row], labels[row] = read_image(path, self.size, self.random_of(key)), int(self.files.labels[image])
                    break
                except Exception as error:  # Pillow's decoders can raise anything
                    unreadable[path] = f"{type(error).__name__}: {error}"
            else:
                raise OSError(f"{path} and the images before it cannot be read ({unreadable[path]}); is the disk still there?")
        return images, labels, unreadable

    def candidates(self, key: Key) -> Iterator[int]:
        """Yield the image of the key, then its successors in the order."""
        epoch, position, image = key
        yield image
        count = len(self.files)
        order = (
            range(count) if epoch is None else shuffled(count, self.seed, epoch).tolist()
        )  # computed only if needed, as it is long
        for step in range(1, count):
            yield order[(position + step) % count]

    def random_of(self, key: Key) -> random.Random | None:
        epoch, position, _ = key
        return random.Random(f"{self.seed} {epoch} {position}") if self.augment and epoch is not None else None


def read_image(path: str, size: int, chance: random.Random | None) -> Tensor:
    """Return a random crop of an image, or its centre if `chance` is None, as uint8 [3, size, size]."""
    from PIL import Image  # not at the top: other datasets do without Pillow

    with open_image(path) as image:
        box = random_box(*image.size, chance) if chance else centre_box(*image.size)
        pixels = np.asarray(image.convert("RGB").resize((size, size), Image.Resampling.BILINEAR, box))
    if chance and chance.random() < 0.5:
        pixels = pixels[:, ::-1]
    return torch.from_numpy(np.array(pixels.transpose(2, 0, 1), order="C"))


def centre_box(width: int, height: int) -> Box:
    """Return the box that resizing the short side to 256 and cropping the central 224×224 keeps; other sizes in proportion."""
    side = CENTRE * min(width, height)
    return (width - side) / 2, (height - side) / 2, (width + side) / 2, (height + side) / 2


def random_box(width: int, height: int, chance: random.Random) -> Box:
    """Return a random box of 8 to 100 % of the area and an aspect ratio of 3:4 to 4:3.

    If ten tries do not fit, return the largest central box with an allowed aspect ratio.
    """
    for _ in range(10):
        area, ratio = width * height * chance.uniform(0.08, 1), math.exp(chance.uniform(math.log(3 / 4), math.log(4 / 3)))
        w, h = math.sqrt(area * ratio), math.sqrt(area / ratio)
        if w <= width and h <= height:
            left, top = chance.uniform(0, width - w), chance.uniform(0, height - h)
            return left, top, min(left + w, width), min(top + h, height)
    w, h = min(width, height * 4 / 3), min(height, width * 4 / 3)
    return (width - w) / 2, (height - h) / 2, (width + w) / 2, (height + h) / 2
