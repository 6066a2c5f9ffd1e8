"""Small models of many families: each turns [8, 8, 8] into scores of 4 classes."""

from collections.abc import Callable

import torch
from timm.layers import StdConv2d
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm
from transformers.pytorch_utils import Conv1D

F = nn.functional


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(x.view(len(x), 4, 16)).mean(1))


class FusedAttention(nn.Module):
    """Query, key and value are one linear layer, as in timm."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.head = nn.Linear(16, 48), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.scaled_dot_product_attention(*self.qkv(x.view(len(x), 4, 16)).chunk(3, -1)).mean(1))


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.recurrent, self.head = kind(8, 16, batch_first=True), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.recurrent(x)[0].mean(1))


class Cell(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.LSTMCell(8, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        state = None
        for column in x.unbind(1):
            state = self.cell(column, state)
        return self.head(state[0])


class Experts(nn.Module):
    """Two experts as one stack of weights, both used for every input."""

    def __init__(self) -> None:
        super().__init__()
        self.experts, self.head = nn.Parameter(torch.randn(2, 16, 64) / 8), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        outputs = F.linear(x.flatten(1), self.experts.flatten(0, 1)).unflatten(1, (2, 16))
        return self.head(outputs.sum(1).relu())


class Adapter(nn.Module):
    """A layer of a class that optg does not know, whose weight is most of the model."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix, self.head = nn.Parameter(torch.randn(32, 64) / 8), nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.linear(x.flatten(1), self.matrix).relu())


MODELS: dict[str, Callable[[], nn.Module]] = {
    "mlp": lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4)),
    "cnn": lambda: nn.Sequential(
        nn.Unflatten(1, (1, 8)), nn.Conv2d(1, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(),
        nn.ConvTranspose2d(8, 8, 1), nn.Flatten(), nn.Linear(512, 4),
    ),
    "attention": Attention,
    "fused attention": FusedAttention,
    "LSTM": lambda: Recurrent(nn.LSTM),
    "GRU": lambda: Recurrent(nn.GRU),
    "LSTM cell": Cell,
    "experts": Experts,
    "transformers' Conv1D": lambda: nn.Sequential(nn.Flatten(), Conv1D(32, 64), nn.ReLU(), nn.Linear(32, 4)),
    "conv1d": lambda: nn.Sequential(nn.Conv1d(8, 16, 3), nn.ReLU(), nn.Flatten(), nn.Linear(96, 4)),
    "unknown class": Adapter,
    "weight norm": lambda: nn.Sequential(nn.Flatten(), weight_norm(nn.Linear(64, 32)), nn.ReLU(), nn.Linear(32, 4)),
    "timm's standardized convolution": lambda: nn.Sequential(
        nn.Unflatten(1, (1, 8)), StdConv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(512, 4)
    ),
}  # fmt: skip
