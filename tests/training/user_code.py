"""A model and a dataset as users bring them: `tests.training.user_code:model`, `…:data`. float64, without batch norm."""

import os
import signal
import time

import torch
from torch import nn


class ToDouble(nn.Module):
    def forward(self, x):
        return x.double()


def model(classes: int, width: int = 24) -> nn.Module:
    first = [ToDouble(), nn.Conv2d(1, 6, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()]
    return nn.Sequential(*first, nn.Linear(6 * 16, width), nn.ReLU(), nn.Linear(width, classes)).double()


def data(folder=None):
    g = torch.Generator().manual_seed(0)
    images, labels = torch.randn(200, 1, 8, 8, generator=g, dtype=torch.float64), torch.randint(4, (200,), generator=g)
    return (images[:160], labels[:160]), (images[160:], labels[160:])


def slow(classes: int) -> nn.Module:
    """The same model, slow enough to be killed in the middle of training."""
    slowed = model(classes)
    slowed.register_forward_pre_hook(lambda *_: time.sleep(0.02))
    return slowed


def stopping(classes: int) -> nn.Module:
    """The same model, which sends itself SIGTERM three times: within an epoch, at the end of one, and at the very end."""
    stopped = model(classes)
    stopped.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def count(module: nn.Module, _: object) -> None:
        if module.training:
            module.calls += 1
            if module.calls in (15, 20, 60):
                os.kill(os.getpid(), signal.SIGTERM)

    stopped.register_forward_pre_hook(count)
    return stopped


def diverging(classes: int) -> nn.Module:
    """The same model, whose output is NaN from step 13 on."""

    class Diverging(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = model(classes)
            self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

        def forward(self, x):
            if self.training:
                self.calls += 1
            return self.inner(x) * torch.where(self.calls > 12, torch.nan, 1.0)

    return Diverging()


def normed(classes: int) -> nn.Module:
    """A float32 model with batch norm, a residual sum and dropout, for int8. Its activations work in place."""
    return Normed(classes)


class Normed(nn.Module):
    def __init__(self, classes: int) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(1, 6, 3, padding=1, bias=False), nn.BatchNorm2d(6)
        self.conv2, self.norm2 = nn.Conv2d(6, 6, 3, padding=1), nn.BatchNorm2d(6)
        self.relu, self.drop, self.out = nn.ReLU(inplace=True), nn.Dropout(0.1), nn.Linear(6, classes)

    def forward(self, x):
        x = self.relu(self.norm1(self.conv1(x.to(self.conv1.weight.dtype))))
        y = self.norm2(self.conv2(x))
        y += x
        return self.out(self.drop(self.relu(y).mean((2, 3))))
