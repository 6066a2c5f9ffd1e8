"""The interface of a dataset, and which rank gets which image when.

An epoch is ⌊n / batch⌋ full batches in a fresh order. The order and every random choice about an image depend only on
(seed, epoch, position in the epoch). So a run on any number of ranks, or resumed in the middle of an epoch, sees the same
images bit for bit, and torch's global random state is not touched.
"""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

Batch = tuple[Tensor, Tensor]  # images [b, C, H, W], float32; labels [b], int64


@dataclass(frozen=True, kw_only=True)
class Request:
    """The checked arguments of `optg.data.load`."""

    name: str
    folder: Path
    batch_size: int  # over all ranks
    device: torch.device
    seed: int
    rank: int = 0
    world: int = 1
    workers: int | None = None  # processes that decode images, if the dataset decodes any
    augment: bool = True
    size: int | None = None  # height and width of the images, if the dataset lets one choose
    validate: bool = False  # hold out a tenth of the training images

    def __post_init__(self) -> None:
        for name in ("batch_size", "world"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; expected at least 1")
        if not 0 <= self.rank < self.world:
            raise ValueError(f"rank is {self.rank}; expected at least 0 and below world, which is {self.world}")
        if self.batch_size % self.world:
            raise ValueError(f"batch_size is {self.batch_size}; expected a multiple of world, which is {self.world}")
        if self.workers is not None and self.workers < 0:
            raise ValueError(f"workers is {self.workers}; expected at least 0, or None for one per core, up to 8")
        if self.size is not None and self.size < 1:
            raise ValueError(f"size is {self.size}; expected at least 1 pixel")


class Data(ABC):
    """Training and test images in batches, as one rank sees them."""

    def __init__(
        self, request: Request, classes: int, shape: tuple[int, int, int], sizes: tuple[int, int], held_out: int = 0
    ) -> None:
        if sizes[0] < request.batch_size:
            left = " left beside its validation images" if held_out else ""
            raise ValueError(f"batch_size is {request.batch_size}; {request.name} has {sizes[0]} training images{left}")
        if request.validate and not held_out:
            raise ValueError(f"{request.name} has {sizes[0]} training images; expected at least 2 to hold out a tenth of them")
        self.request = request
        self.classes = classes
        self.shape = shape  # channels, height and width of an image
        self.sizes = sizes  # number of training and of test images
        self.held_out = held_out  # number of validation images, which are no longer training images

    @abstractmethod
    def train(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        """Yield this rank's part of each batch of an epoch, from batch `start` on."""

    @abstractmethod
    def test(self) -> Iterator[Batch]:
        """Yield this rank's part of the test images, in order.

        All ranks get the same number of batches, so that none waits for another. If the last batch has fewer images than
        there are ranks, it is empty on some of them.
        """

    @abstractmethod
    def validation(self) -> Iterator[Batch]:
        """Yield this rank's part of the validation images, like `test`. There are none unless the request asks for them."""

    @property
    def steps_per_epoch(self) -> int:
        return self.sizes[0] // self.request.batch_size

    @property
    def test_batch(self) -> int:
        """Number of test images in a batch over all ranks."""
        return self.request.batch_size

    @property
    def skipped(self) -> int:
        """Number of images that could not be read so far."""
        return 0

    def steps(self, start: int) -> range:
        if not 0 <= start <= self.steps_per_epoch:
            raise ValueError(f"start is {start}; expected 0 to {self.steps_per_epoch}, the batches of an epoch")
        return range(start, self.steps_per_epoch)

    def train_rows(self, step: int) -> slice:
        """Return this rank's positions in the order of the epoch at a step."""
        share = self.request.batch_size // self.request.world
        first = step * self.request.batch_size + self.request.rank * share
        return slice(first, first + share)

    def test_rows(self, size: int) -> Iterator[slice]:
        """Yield this rank's part of each batch of `size` images."""
        rank, world = self.request.rank, self.request.world
        for first in range(0, size, self.test_batch):
            count = min(self.test_batch, size - first)
            yield slice(first + count * rank // world, first + count * (rank + 1) // world)


def last_tenth(labels: Tensor, by_class: bool) -> Tensor:
    """Return a mask of the last tenth of the images, or of the images of each class: at least 1 of 2 or more."""
    held = torch.zeros(len(labels), dtype=torch.bool)
    groups = [(labels == label).nonzero().flatten() for label in labels.unique()] if by_class else [torch.arange(len(labels))]
    for group in groups:
        count = max(len(group) // 10, len(group) > 1)
        held[group[len(group) - count :]] = True
    return held


def shuffled(count: int, seed: int, epoch: int) -> Tensor:
    """Return the order of the images in an epoch."""
    return torch.randperm(count, generator=generator(seed, epoch, "order"))


def generator(*key: int | str) -> torch.Generator:
    """Return a random generator that depends only on the key, and is the same on every rank and device."""
    digest = hashlib.sha256(" ".join(map(str, key)).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8]))
