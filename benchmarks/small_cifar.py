"""Shared by the CPU experiments on CIFAR: halved images, an augmentation, and one way to train a small network."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import optg
from optg.methods import Method

BATCH, LR, DECAY = 128, 0.1, 1e-3


def halve(images: Tensor) -> Tensor:
    """Normalise bytes and average every 2×2 pixels."""
    return F.avg_pool2d((images.float() - 120) / 60, 2)


def vgg(*widths: int, classes: int = 10) -> nn.Sequential:
    """Return 3×3 convolutions of these widths with batch norm, on three input channels; 0 halves the image."""
    layers: list[nn.Module] = []
    inputs = 3
    for width in widths:
        block = [nn.Conv2d(inputs, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()] if width else []
        layers, inputs = layers + (block or [nn.MaxPool2d(2)]), width or inputs
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, classes))


def augment(images: Tensor, generator: torch.Generator) -> Tensor:
    """Mirror each image by chance, and shift the batch by up to two pixels."""
    flip = torch.rand(len(images), generator=generator) < 0.5
    images = torch.where(flip[:, None, None, None], images.flip(3), images)
    shift = torch.randint(-2, 3, (2,), generator=generator).tolist()
    return F.pad(images, (2, 2, 2, 2)).roll(shift, (2, 3))[:, :, 2:-2, 2:-2]


def train(
    model: nn.Module,
    images: Tensor,
    labels: Tensor,
    method: Method,
    sparsity: float,
    epochs: int,
    hold: float = 0.0,
    seed: int = 0,
    watch: Callable[[optg.Sparsifier], None] = lambda sparsifier: None,
    **options: Any,
) -> None:
    """Train and sparsify. The learning rate is constant for a share `hold` of training, then follows a cosine.

    `watch` is called after each backward pass. `options` are further arguments of `sparsify`.
    """
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9, weight_decay=DECAY)
    steps = len(images) // BATCH
    sparsifier = optg.sparsify(model, optimizer, method, sparsity=sparsity, epochs=epochs, steps_per_epoch=steps, **options)
    for _ in range(epochs):
        for index in torch.randperm(len(images), generator=generator).split(BATCH)[:steps]:
            progress = max(sparsifier.clock.progress - hold, 0) / (1 - hold)
            optimizer.param_groups[0]["lr"] = LR * (1 + math.cos(math.pi * progress)) / 2
            optimizer.zero_grad()
            F.cross_entropy(model(augment(images[index], generator)), labels[index]).backward()
            watch(sparsifier)
            optimizer.step()
    sparsifier.finish()
    model.eval()


@torch.no_grad()
def accuracy(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    """Return the share of images that the model classifies correctly."""
    right = [model(part).argmax(1) == wanted for part, wanted in zip(images.split(1000), labels.split(1000))]
    return float(torch.cat(right).float().mean())
