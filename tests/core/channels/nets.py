"""Networks whose channels are coupled in many ways, and helpers that remove channels from them."""

from typing import Any

import torch
from torch import Tensor, nn

from optg.core.channels.groups import Group, zeroed_tensors


def fill(model: nn.Module, seed: int = 0) -> nn.Module:
    """Give all parameters and statistics values that a trained model might have, and no zeros. Return the model, evaluating."""
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=g) * (1.5 / p[0].numel()) ** 0.5 if p.ndim > 1 else p + 0.3)
        for name, buffer in model.named_buffers():
            if buffer.is_floating_point():
                buffer.copy_(torch.rand(buffer.shape, generator=g) + (0.5 if name.endswith("var") else -0.5))
    return model.eval()


def zero(model: nn.Module, group: Group, units: list[int]) -> None:
    """Set the sources of these units to 0."""
    with torch.no_grad():
        for name, tensor in zeroed_tensors(model, [(group, torch.tensor(units, dtype=torch.int64))]).items():
            model.get_parameter(name).copy_(tensor)


def zero_half(model: nn.Module, groups: list[Group], seed: int = 0) -> int:
    """Set half of the units of all removable groups to 0. Return how many units these are."""
    g, zeroed = torch.Generator().manual_seed(seed), 0
    for group in groups:
        if group.removable:
            zero(model, group, torch.randperm(group.size, generator=g)[: group.size // 2].tolist())
            zeroed += group.size // 2
    return zeroed


def difference(model: nn.Module, small: nn.Module, example: Tensor) -> float:
    """Return the largest difference between two models on random inputs, relative to the largest output."""
    x = torch.randn(3, *example.shape[1:], generator=torch.Generator().manual_seed(1), dtype=example.dtype)
    with torch.no_grad():
        expected, found = model.eval()(x), small.eval()(x)
    assert expected.shape == found.shape
    return float((expected - found).abs().max() / expected.abs().max().clamp(min=1e-3))


def conv(inputs: int, outputs: int, kernel: int = 3, **options: Any) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, kernel, padding=kernel // 2, **options)


class UNet(nn.Module):
    """Two levels, with skips that are concatenated."""

    def __init__(self) -> None:
        super().__init__()
        self.down1, self.norm1 = conv(3, 8), nn.BatchNorm2d(8)
        self.down2, self.norm2 = conv(8, 16), nn.BatchNorm2d(16)
        self.middle = conv(16, 32)
        self.up2 = nn.ConvTranspose2d(32, 16, 2, stride=2)
        self.join2 = conv(32, 16)
        self.up1 = nn.ConvTranspose2d(16, 8, 2, stride=2)
        self.join1 = conv(16, 8)
        self.head = conv(8, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        first = self.norm1(self.down1(x)).relu()
        second = self.norm2(self.down2(nn.functional.max_pool2d(first, 2))).relu()
        third = self.middle(nn.functional.max_pool2d(second, 2)).relu()
        second = self.join2(torch.cat([second, self.up2(third)], 1)).relu()
        first = self.join1(torch.cat([first, self.up1(second)], 1)).relu()
        return self.head(first)


# ---- random networks: a list of steps, each of which makes new channels from those of earlier steps


class RandomNet(nn.Module):
    """A network that carries out steps, then flattens or averages, then classifies."""

    def __init__(self, steps: list[tuple[str, int]], flatten: bool, width: int) -> None:
        super().__init__()
        self.kinds = [kind for kind, _ in steps]
        self.flatten = flatten
        self.stem = conv(3, width)
        self.layers = nn.ModuleList()
        for kind, size in steps:
            layer, width = STEPS[kind](width, size)
            self.layers.append(layer)
        self.head = nn.Linear(width * (16 if flatten else 1), 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x).relu()
        for layer in self.layers:
            x = layer(x)
        return self.head(x.flatten(1) if self.flatten else x.mean((2, 3)))


class Residual(nn.Module):
    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        return (x + self.body(x)).relu()


class Dense(nn.Module):
    """Append new channels to those given, as in a DenseNet."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x, self.body(x)], 1)


class Gate(nn.Module):
    """Multiply one half of the channels by the other half's sigmoid, as a gated linear unit does."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.conv = conv(inputs, 2 * outputs)

    def forward(self, x: Tensor) -> Tensor:
        value, gate = self.conv(x).chunk(2, 1)
        return value * gate.sigmoid()


class SqueezeExcite(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.down, self.up = conv(channels, 4, 1), conv(4, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.up(self.down(x.mean((2, 3), keepdim=True)).relu()).sigmoid()


def normed(inputs: int, outputs: int, act: nn.Module | None = None) -> nn.Sequential:
    return nn.Sequential(conv(inputs, outputs, bias=False), nn.BatchNorm2d(outputs), act or nn.ReLU())


STEPS = {
    "conv": lambda width, size: (nn.Sequential(conv(width, size), nn.SiLU()), size),
    "norm": lambda width, size: (normed(width, size), size),
    "prelu": lambda width, size: (normed(width, size, nn.PReLU(size)), size),
    "residual": lambda width, size: (Residual(nn.Sequential(normed(width, size), conv(size, width, 1))), width),
    "dense": lambda width, size: (Dense(normed(width, size)), width + size),
    "depthwise": lambda width, size: (nn.Sequential(conv(width, width, groups=width), nn.BatchNorm2d(width), nn.ReLU()), width),
    "grouped": lambda width, size: (
        (nn.Sequential(conv(width, 2 * width, groups=max(1, width // 2)), nn.ReLU()), 2 * width)
        if width % 2 == 0
        else (nn.Identity(), width)
    ),
    "group norm": lambda width, size: (nn.Sequential(conv(width, 2 * size), nn.GroupNorm(size, 2 * size), nn.ReLU()), 2 * size),
    "transposed": lambda width, size: (nn.Sequential(nn.ConvTranspose2d(width, size, 3, padding=1), nn.ReLU()), size),
    "gate": lambda width, size: (Gate(width, size), size),
    "excite": lambda width, size: (SqueezeExcite(width), width),
    "sigmoid": lambda width, size: (nn.Sequential(conv(width, size), nn.Sigmoid()), size),
    "no affine": lambda width, size: (nn.Sequential(conv(width, size), nn.BatchNorm2d(size, affine=False), nn.ReLU()), size),
    "instance": lambda width, size: (nn.Sequential(conv(width, size), nn.InstanceNorm2d(size, affine=True), nn.ReLU()), size),
    "softmax": lambda width, size: (nn.Sequential(conv(width, size), nn.Softmax(1)), size),
    "layer norm": lambda width, size: (nn.Sequential(conv(width, size), nn.GroupNorm(1, size)), size),
}
