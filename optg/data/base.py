"""What a training loop asks of a dataset, and who gets which image when.

An epoch is ⌊n / batch⌋ full batches of a fresh order. The order, and every random choice about an image, is a function of
(seed, epoch, position in the epoch) alone. So a run on any number of ranks, or resumed in the middle of an epoch, sees the
same images bit for bit, and torch's global random numbers are left alone.
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
    """The arguments of `optg.data.load`, checked."""

    name: str
    folder: Path
    batch_size: int  # of all ranks together
    device: torch.device
    seed: int
    rank: int = 0
    world: int = 1
    workers: int | None = None  # processes that decode images, where images are decoded
    augment: bool = True
    size: int | None = None  # height and width of the images, where they can be chosen

    def __post_init__(self) -> None:
        for name in ("batch_size", "world"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; expected at least 1")
        if not 0 <= self.rank < self.world:
            raise ValueError(f"rank is {self.rank}; expected at least 0 and below world, which is {self.world}")
        if self.batch_size % self.world:
            raise ValueError(f"batch_size is {self.batch_size}; expected a multiple of world, which is {self.world}")
        if self.workers is not None and self.workers < 0:
            raise ValueError(f"workers is {self.workers}; expected at least 0, or None for one a core, up to 8")
        if self.size is not None and self.size < 1:
            raise ValueError(f"size is {self.size}; expected at least 1 pixel")


class Data(ABC):
    """Images to train on and to test with, a batch at a time, as one rank sees them."""

    def __init__(self, request: Request, classes: int, shape: tuple[int, int, int], sizes: tuple[int, int]) -> None:
        if sizes[0] < request.batch_size:
            raise ValueError(f"batch_size is {request.batch_size}; {request.name} has {sizes[0]} training images")
        self.request = request
        self.classes = classes
        self.shape = shape  # of one image as the model sees it: channels, height, width
        self.sizes = sizes  # how many images for training, and for testing

    @abstractmethod
    def train(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        """This rank's rows of an epoch's batches, from batch `start` on."""

    @abstractmethod
    def test(self) -> Iterator[Batch]:
        """This rank's rows of all test images, in order.

        All ranks get equally many batches, so that none waits for another; where the last has fewer images than there are
        ranks, some ranks' part of it is empty.
        """

    @property
    def steps_per_epoch(self) -> int:
        return self.sizes[0] // self.request.batch_size

    @property
    def test_batch(self) -> int:
        """How many test images all ranks look at together."""
        return self.request.batch_size

    @property
    def skipped(self) -> int:
        """How many images could not be read so far."""
        return 0

    def steps(self, start: int) -> range:
        if not 0 <= start <= self.steps_per_epoch:
            raise ValueError(f"start is {start}; expected 0 to {self.steps_per_epoch}, the batches of an epoch")
        return range(start, self.steps_per_epoch)

    def train_rows(self, step: int) -> slice:
        """The positions in an epoch's order that are this rank's at a step."""
        share = self.request.batch_size // self.request.world
        first = step * self.request.batch_size + self.request.rank * share
        return slice(first, first + share)

    def test_rows(self) -> Iterator[slice]:
        """The test images that are this rank's, of each batch."""
        rank, world = self.request.rank, self.request.world
        for first in range(0, self.sizes[1], self.test_batch):
            count = min(self.test_batch, self.sizes[1] - first)
            yield slice(first + count * rank // world, first + count * (rank + 1) // world)


def shuffled(count: int, seed: int, epoch: int) -> Tensor:
    """The order of an epoch."""
    return torch.randperm(count, generator=generator(seed, epoch, "order"))


def generator(*key: int | str) -> torch.Generator:
    """Random numbers that are a function of the key, the same on every rank and device."""
    digest = hashlib.sha256(" ".join(map(str, key)).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8]))
