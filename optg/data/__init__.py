"""Datasets by name. `DATASETS` is the only registry: to add a dataset, write one file and add one line here.

A dataset is a function from a `Request` to `Data`. If it fits into memory, it only has to read its tensors (`InMemory`).
Besides the names in the registry, `load` accepts

    synthetic:SHAPE:CLASSES:IMAGES  random images, such as synthetic:3x224x224:1000:1024
    package.module:function         your own function, called with `folder=...`, if `optg.trust` allows its import
"""

from collections.abc import Callable
from pathlib import Path

import torch

from optg.data import cifar, digits, imagenet, own, synthetic
from optg.data.base import Data, Request
from optg.naming import nearest

DATASETS: dict[str, Callable[[Request], Data]] = {
    "digits": digits.serve,
    "cifar10": cifar.serve,
    "cifar100": cifar.serve,
    "imagenet": imagenet.serve,
    "synthetic": synthetic.serve,
}

ELSEWHERE = ("synthetic:SHAPE:CLASSES:IMAGES", "package.module:function")

__all__ = ["DATASETS", "ELSEWHERE", "Data", "load"]


def load(
    name: str,
    folder: str | Path | None = None,
    *,
    batch_size: int,
    device: torch.device | str,
    seed: int,
    rank: int = 0,
    world: int = 1,
    workers: int | None = None,
    augment: bool = True,
    size: int | None = None,
    validate: bool = False,
) -> Data:
    """Load a dataset by name.

    Args:
        folder: of its files; default: ./data.
        batch_size: over all ranks.
        seed: of the order and the augmentation.
        rank, world: of this process, among those that share each batch.
        workers: processes that decode images (imagenet); default: one per core, at most 8.
        augment: whether to augment training images, if the dataset has an augmentation.
        size: height and width of the images (imagenet); default: 224.
        validate: hold out the last tenth of the training images for `validation`: the last tenth of each class if they may be
            in the order of their classes (imagenet, and your own function).
    """
    where, device = Path(folder or "data").expanduser(), torch.device(device)
    request = Request(
        name=name, folder=where, batch_size=batch_size, device=device, seed=seed, rank=rank, world=world, workers=workers,
        augment=augment, size=size, validate=validate,
    )  # fmt: skip
    source, colon, _ = name.partition(":")
    if name in DATASETS or source == "synthetic":
        return DATASETS[source](request)
    if not colon:
        raise ValueError(f"unknown dataset {name!r}; {nearest(name, [*DATASETS, *ELSEWHERE])}")
    return own.serve(request)
