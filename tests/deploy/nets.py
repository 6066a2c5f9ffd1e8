"""Networks that the deployment tests share."""

from functools import cache

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from optg import models
from optg.deploy.bench import prune_at_random, settle_norms
from optg.deploy.graph import Graph, capture


class Odd(nn.Module):
    """A model with unsupported operations, in-place writes, tied weights, three kinds of constants and several outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True))
        self.norm = nn.GroupNorm(2, 8)
        self.squeeze, self.excite = nn.Linear(8, 4), nn.Linear(4, 8)
        self.dropout = nn.Dropout(0.5)
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.second.weight = self.first.weight
        self.shift = torch.linspace(-1, 1, 8)
        self.register_buffer("scale", torch.full((8,), 0.5), persistent=False)
        self.register_buffer("count", torch.tensor(3))

    def forward(self, x: Tensor) -> dict[str, Tensor | tuple[Tensor, int]]:
        x = self.stem(x)
        x[:, 0] += 1
        a, b = self.norm(x).chunk(2, 1)
        x = torch.cat([F.silu(b), a.cumsum(2)], 1)
        x = x * torch.sigmoid(self.excite(F.mish(self.squeeze(x.mean((2, 3))))))[:, :, None, None]
        y = F.interpolate(x, scale_factor=2, mode="bilinear").amax((2, 3)) * self.scale + self.shift
        y = self.second(self.dropout(self.first(y))) + torch.tensor([1.0, 2, 3, 4, 5, 6, 7, 8])
        return {"logits": y, "more": (F.pixel_shuffle(x, 2).mean((1, 2, 3)), x.shape[0] * 2)}


SHAPES = {
    "digits": (1, 8, 8),
    "vgg19": (3, 32, 32),
    "resnet20": (3, 32, 32),
    "resnet50": (3, 32, 32),
    "mobilenet_v1": (3, 40, 40),
    "vit_ti-cifar": (3, 32, 32),
}


@cache
def sparse(name: str, sparsity: float = 0.98) -> nn.Module:
    """Return one of our models with random zeros and settled norms. Do not change it: all tests share it."""
    torch.manual_seed(0)
    model = models.build(name, 10)
    prune_at_random(model, sparsity)
    settle_norms(model, SHAPES[name])
    return model.eval()


@cache
def captured(name: str) -> Graph:
    """Return the graph of `sparse(name)`."""
    return capture(sparse(name), torch.zeros(1, *SHAPES[name]))
