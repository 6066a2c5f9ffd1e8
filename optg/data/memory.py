"""A dataset that is kept whole in the device's memory, as the bytes it came in: a batch costs a gather, and no worker."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from optg.data.augment import crop_and_flip, normalise
from optg.data.base import Batch, Data, Request, generator, shuffled

TEST_BATCH = 1024  # no gradients are kept: more at once keep a GPU busy
Split = tuple[Tensor, Tensor]  # images [N, C, H, W], uint8 or float32; labels [N], int64


@dataclass(frozen=True)
class Tensors:
    """A dataset as its file has it."""

    train: Split
    test: Split
    classes: int
    mean: Sequence[float] = (0.0,)  # of each channel, in units of the pixels
    std: Sequence[float] = (1.0,)
    pad: int = 0  # augment with crops from images padded by so many pixels, and flips; 0: images stay as they are


class InMemory(Data):
    def __init__(self, request: Request, tensors: Tensors) -> None:
        (train_images, train_labels), (test_images, test_labels) = tensors.train, tensors.test
        channels, height, width = train_images.shape[1:]
        if request.size not in (None, height):
            raise ValueError(f"size is {request.size}; {request.name} has images of {height}×{width}. Leave it out")
        super().__init__(request, tensors.classes, (channels, height, width), (len(train_images), len(test_images)))
        device = request.device
        self.images, self.labels = train_images.to(device), train_labels.to(device)
        self.test_images, self.test_labels = test_images.to(device), test_labels.to(device)
        self.mean, self.std = (torch.tensor(values, device=device)[:, None, None] for values in (tensors.mean, tensors.std))
        self.pad = tensors.pad if request.augment else 0
        self.kernels = None

    def train(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        order, top, left, flip = self.draw(epoch)
        for step in self.steps(start):
            rows = self.train_rows(step)
            index = order[rows]
            if not self.pad:
                images = normalise(self.images[index], self.mean, self.std)
            elif self.kernels:  # the same in one pass
                placed = index, top[rows], left[rows], flip[rows]
                images = self.kernels.crop_and_flip(self.images, *placed, self.pad, self.mean, self.std)
            else:
                images = crop_and_flip(self.images, index, top[rows], left[rows], flip[rows], self.pad)
                images = normalise(images, self.mean, self.std)
            yield images, self.labels[index]

    def test(self) -> Iterator[Batch]:
        for rows in self.test_rows():
            yield normalise(self.test_images[rows], self.mean, self.std), self.test_labels[rows]

    @property
    def test_batch(self) -> int:
        return max(self.request.batch_size, TEST_BATCH)

    def draw(self, epoch: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """All that is random in an epoch, by position: the image, its crop's top and left, and whether it is mirrored.

        Drawn on the CPU and moved at once, so that a batch needs no random number, no sync, and is alike on every device.
        """
        count, seed = self.sizes[0], self.request.seed
        crops = generator(seed, epoch, "crops")
        top, left = torch.randint(2 * self.pad + 1, (2, count), generator=crops).to(self.request.device)
        flip = torch.randint(2, (count,), generator=crops).bool().to(self.request.device)
        return shuffled(count, seed, epoch).to(self.request.device), top, left, flip
