"""Datasets kept in the memory of the device, as the bytes they came in. A batch costs a gather and needs no worker."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from optg.data.augment import choose_augmentation, normalise
from optg.data.base import Batch, Data, Request, generator, last_tenth, shuffled

TEST_BATCH = 1024  # without gradients there is memory for more images, which keep a GPU busy
Split = tuple[Tensor, Tensor]  # images [N, C, H, W], uint8 or float32; labels [N], int64


@dataclass(frozen=True)
class Tensors:
    """A dataset as read from its files."""

    train: Split
    test: Split
    classes: int
    mean: Sequence[float] = (0.0,)  # one per channel, in units of the pixels; a single one holds for all channels
    std: Sequence[float] = (1.0,)
    pad: int = 0  # augment with flips and with crops from images padded by this many pixels; 0: no augmentation
    sorted: bool = False  # training images may be in the order of their classes: hold out a tenth of each class


class InMemory(Data):
    def __init__(self, request: Request, tensors: Tensors) -> None:
        (train_images, train_labels), (test_images, test_labels) = tensors.train, tensors.test
        held_images, held_labels = train_images[:0], train_labels[:0]
        if request.validate:
            held = last_tenth(train_labels.cpu(), tensors.sorted).to(train_images.device)
            held_images, held_labels = train_images[held], train_labels[held]
            train_images, train_labels = train_images[~held], train_labels[~held]
        channels, height, width = train_images.shape[1:]
        if request.size not in (None, height):
            raise ValueError(f"size is {request.size}; {request.name} has images of {height}×{width}. Leave size out")
        sizes = len(train_images), len(test_images)
        super().__init__(request, tensors.classes, (channels, height, width), sizes, len(held_images))
        device = request.device
        self.images, self.labels = train_images.to(device), train_labels.to(device)
        self.tested = test_images.to(device), test_labels.to(device)
        self.held = held_images.to(device), held_labels.to(device)
        self.mean, self.std = (
            torch.tensor(values, device=device).expand(channels).contiguous()[:, None, None]
            for values in (tensors.mean, tensors.std)
        )
        self.pad = tensors.pad if request.augment else 0
        self.augmented = choose_augmentation(device)

    def train(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        order, top, left, flip = self.draw(epoch)
        for step in self.steps(start):
            rows = self.train_rows(step)
            index = order[rows]
            if self.pad:
                crops = top[rows], left[rows], flip[rows]
                images = self.augmented(self.images, index, *crops, self.pad, self.mean, self.std)
            else:
                images = normalise(self.images[index], self.mean, self.std)
            yield images, self.labels[index]

    def test(self) -> Iterator[Batch]:
        return self.in_order(*self.tested)

    def validation(self) -> Iterator[Batch]:
        return self.in_order(*self.held)

    def in_order(self, images: Tensor, labels: Tensor) -> Iterator[Batch]:
        for rows in self.test_rows(len(labels)):
            yield normalise(images[rows], self.mean, self.std), labels[rows]

    @property
    def test_batch(self) -> int:
        return max(self.request.batch_size, TEST_BATCH)

    def draw(self, epoch: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return all random choices of an epoch, by position: image, top and left of its crop, and whether it is mirrored.

        They are drawn on the CPU and moved once. So a batch needs no random numbers and no synchronisation, and every device
        sees the same images.
        """
        count, seed = self.sizes[0], self.request.seed
        crops = generator(seed, epoch, "crops")
        top, left = torch.randint(2 * self.pad + 1, (2, count), generator=crops).to(self.request.device)
        flip = torch.randint(2, (count,), generator=crops).bool().to(self.request.device)
        return shuffled(count, seed, epoch).to(self.request.device), top, left, flip
