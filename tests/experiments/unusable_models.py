"""Models that `optg paradox` must refuse."""

import torch
from torch import Tensor, nn


class TupleOutput(nn.Linear):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return super().forward(x.flatten(1)), x


def constant_linear(value: float, classes: int) -> nn.Module:
    layer = nn.Linear(64, classes)
    nn.init.constant_(layer.weight, value)
    return nn.Sequential(nn.Flatten(), layer)


def no_weights(classes: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.ReLU())


def nan_weights(classes: int) -> nn.Module:
    return constant_linear(torch.nan, classes)


def zero_weights(classes: int) -> nn.Module:
    return constant_linear(0.0, classes)


def tuple_output(classes: int) -> nn.Module:
    return TupleOutput(64, classes)


def too_few_outputs(classes: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 2))
