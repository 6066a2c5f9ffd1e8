"""A network for the bundled digits: one channel, 8×8 pixels."""

from torch import nn

from optg.models.layers import conv_norm_relu


def digits(classes: int = 10) -> nn.Sequential:
    """Three convolutions and a classifier: 97,568 weights."""
    return nn.Sequential(
        *conv_norm_relu(1, 32),
        nn.MaxPool2d(2),
        *conv_norm_relu(32, 64),
        *conv_norm_relu(64, 128),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(128 * 2 * 2, classes),
    )
