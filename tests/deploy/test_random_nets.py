"""Compile random networks and compare them with torch in float64, to find combinations that no other test covers.

OPTG_NETS=500 pytest tests/deploy/test_random_nets.py tries more.
"""

import copy
import os
import random

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import optg
from optg.deploy.engine import build

NETS = int(os.environ.get("OPTG_NETS", "60"))
BATCHES = (1, 2, 3, 7, 8, 9, 12, 16, 17, 24, 33)
ISAS = ["native"] + (["avx2"] if "avx2" in build.cpu_flags().split() else [])
ACTIVATIONS = (nn.ReLU, nn.ReLU6, nn.Hardswish, nn.Hardsigmoid, nn.Sigmoid, nn.SiLU, nn.Tanh, nn.LeakyReLU)


class Net(nn.Module):
    """A few random operations on earlier values. Returns the last value and another one."""

    def __init__(self, r: random.Random, image: Tensor) -> None:
        super().__init__()
        self.layers = nn.ModuleList()
        self.inputs: list[list[int]] = []
        values = [image]
        while len(self.layers) < r.randint(3, 9):
            first = r.choice(range(max(0, len(values) - 3), len(values)))
            drawn = self.draw(r, values, first)
            if drawn is None:
                continue
            layer, inputs = drawn
            made = layer.eval()(*(values[i] for i in inputs))
            if made.ndim != 4 or 0 in made.shape or made[0].numel() > 20_000:
                continue
            values.append(made)
            self.layers.append(layer)
            self.inputs.append(inputs)
        self.returned = sorted({len(values) - 1, r.randrange(1, len(values))})

    def draw(self, r: random.Random, values: list[Tensor], first: int) -> tuple[nn.Module, list[int]] | None:
        channels, height, width = values[first].shape[1:]
        kind = r.choice(["conv"] * 5 + ["norm", "activation", "activation", "pool", "mean", "pair", "pair", "cat", "larger"])
        if kind == "conv":
            kernel = r.choice([1, 1, 2, 3, 3, 3, 5, (1, 3), (3, 1)])
            padding, dilation = r.choice([0, 1, (1, 0), (0, 1), 2]), r.choice([1, 1, 1, 2])
            groups, outputs = r.choice([(1, 1), (1, 3), (1, 8), (1, 17), (channels, channels)])
            reach = [(k - 1) * dilation + 1 for k in (kernel if isinstance(kernel, tuple) else (kernel, kernel))]
            if reach[0] > height or reach[1] > width:
                return None
            layer = nn.Conv2d(channels, outputs, kernel, r.choice([1, 1, 1, 2, 3]), padding, dilation, groups, r.random() < 0.5)
            with torch.no_grad():
                layer.weight.mul_(torch.rand_like(layer.weight) < r.choice([0.05, 0.3, 1.0]))
            return layer, [first]
        if kind == "norm":
            norm = nn.BatchNorm2d(channels)
            norm.running_mean, norm.running_var = torch.randn(channels), torch.rand(channels) + 0.1
            return norm, [first]
        if kind == "activation":
            return r.choice(ACTIVATIONS)(), [first]
        if kind == "pool":
            pool, size = r.choice([nn.MaxPool2d, nn.AvgPool2d]), r.choice([2, 3])
            if size > min(height, width):
                return None
            return pool(size, r.choice([1, 2, 3]), r.choice([0, 1]), ceil_mode=r.random() < 0.3), [first]
        if kind == "mean":
            return nn.AdaptiveAvgPool2d(1), [first]
        if kind == "larger":
            return Function(lambda x: F.interpolate(x, scale_factor=2)), [first]
        others = [i for i, v in enumerate(values) if v.shape[2:] == values[first].shape[2:]]
        if kind == "cat":
            return Function(lambda *x: torch.cat(x, 1)), [first, r.choice(others)]
        others = [i for i in others if values[i].shape == values[first].shape]
        function = r.choice([torch.add, torch.mul, torch.sub])
        return Function(function), [first, r.choice(others)]

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        values = [x]
        for layer, inputs in zip(self.layers, self.inputs):
            values.append(layer(*(values[i] for i in inputs)))
        return tuple(values[i] for i in self.returned)


class Function(nn.Module):
    def __init__(self, function: object) -> None:
        super().__init__()
        self.forward = function  # type: ignore[assignment]


def check_random_net(seed: int, isa: str) -> None:
    """Compile a random net and compare it with torch for three batch sizes."""
    r = random.Random(seed)
    torch.manual_seed(seed)
    shape = r.choice([1, 3, 4, 16]), r.choice([1, 2, 4, 7, 8, 13, 16]), r.choice([1, 3, 4, 8, 14, 16, 31])
    model = Net(r, torch.randn(1, *shape)).eval()
    fast = optg.compile(model, torch.randn(r.choice([1, 2, 16]), *shape), threads=r.choice([1, 2]), isa=isa)
    exact = copy.deepcopy(model).double()
    for batch in r.sample(BATCHES, 3):
        x = torch.randn(batch, *shape)
        with torch.no_grad():
            values, expected = model(x), exact(x.double())
        for got, plain, right in zip(fast(x), values, expected, strict=True):
            assert got.shape == right.shape
            allowed = max(2e-5 * max(1.0, right.abs().max().item()), 20 * (plain - right).abs().max().item())
            assert (got - right).abs().max() <= allowed, f"batch {batch}: {fast}"


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("seed", range(NETS))
def test_random_net_agrees_with_torch(seed: int, isa: str) -> None:
    check_random_net(seed, isa)
