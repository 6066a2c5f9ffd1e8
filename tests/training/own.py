"""A model and data as a user may bring them: `tests.training.own:model`, `tests.training.own:data`. float64, no batch norm."""

import os
import signal
import time

import torch
from torch import nn


class Double(nn.Module):
    def forward(self, x):
        return x.double()


def model(classes: int) -> nn.Module:
    first = [Double(), nn.Conv2d(1, 6, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()]
    return nn.Sequential(*first, nn.Linear(6 * 16, 24), nn.ReLU(), nn.Linear(24, classes)).double()


def data(folder=None):
    g = torch.Generator().manual_seed(0)
    images, labels = torch.randn(200, 1, 8, 8, generator=g, dtype=torch.float64), torch.randint(4, (200,), generator=g)
    return (images[:160], labels[:160]), (images[160:], labels[160:])


def slow(classes: int) -> nn.Module:
    """The same, with time to be killed in."""
    made = model(classes)
    made.register_forward_pre_hook(lambda *_: time.sleep(0.02))
    return made


def stopping(classes: int) -> nn.Module:
    """The same, and three times the process is asked to stop: within an epoch, at the end of one, and at the very end."""
    made = model(classes)
    made.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def count(module: nn.Module, _: object) -> None:
        if module.training:
            module.calls += 1
            if module.calls in (15, 20, 60):
                os.kill(os.getpid(), signal.SIGTERM)

    made.register_forward_pre_hook(count)
    return made


def diverging(classes: int) -> nn.Module:
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
