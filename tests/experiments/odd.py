"""Models that nothing can be measured on."""

import torch
from torch import Tensor, nn


class Pair(nn.Linear):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return super().forward(x.flatten(1)), x


def filled(value: float, classes: int) -> nn.Module:
    layer = nn.Linear(64, classes)
    nn.init.constant_(layer.weight, value)
    return nn.Sequential(nn.Flatten(), layer)


def nothing(classes: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.ReLU())


def nan(classes: int) -> nn.Module:
    return filled(torch.nan, classes)


def zero(classes: int) -> nn.Module:
    return filled(0.0, classes)


def pair(classes: int) -> nn.Module:
    return Pair(64, classes)


def few(classes: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 2))
