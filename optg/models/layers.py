"""Building blocks of the convolutional networks."""

from collections import OrderedDict
from typing import Literal

from torch import nn


def conv(inputs: int, outputs: int, kernel: int = 3, stride: int = 1, groups: int = 1) -> nn.Conv2d:
    """Return a convolution without bias, which the norm after it would cancel."""
    return nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, groups=groups, bias=False)


def conv_norm_relu(inputs: int, outputs: int, kernel: int = 3, stride: int = 1, groups: int = 1) -> list[nn.Module]:
    return [conv(inputs, outputs, kernel, stride, groups), nn.BatchNorm2d(outputs), nn.ReLU()]


def classifier(features: list[nn.Module], width: int, classes: int) -> nn.Sequential:
    """Return features, an average over the image, and one linear layer. Images may have any size."""
    parts = OrderedDict[str, nn.Module]()
    parts["features"] = nn.Sequential(*features)
    parts["pool"] = nn.AdaptiveAvgPool2d(1)
    parts["flatten"] = nn.Flatten()
    parts["classifier"] = nn.Linear(width, classes)
    return nn.Sequential(parts)


def kaiming(model: nn.Sequential, mode: Literal["fan_in", "fan_out"]) -> nn.Sequential:
    """Initialise all convolutions with He et al.'s normal distribution. Other layers keep torch's initialisation."""
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode=mode, nonlinearity="relu")
    return model
