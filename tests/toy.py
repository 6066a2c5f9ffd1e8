"""Small models, data and helpers that the tests share."""

import io
from collections.abc import Callable, Iterable
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import optg
from optg.core.prunable import find_prunable
from optg.core.weights import SparseWeights
from optg.methods import Method

EPOCHS, STEPS = 4, 5  # the length of a run, unless a test gives another

# ---- models and data


def convnet(norm: bool = True) -> nn.Sequential:
    """Return two convolutions and a classifier: 1,928 prunable weights."""
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1, bias=not norm),
        nn.BatchNorm2d(8) if norm else nn.Identity(),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 8, 3, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(8 * 16, 10),
    )


def mlp() -> nn.Sequential:
    """Return two linear layers without biases: 2,368 prunable weights."""
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 32, bias=False), nn.ReLU(), nn.Linear(32, 10, bias=False))


class Conv1D(nn.Module):
    """A linear layer with an input-first weight, like that of transformers."""

    def __init__(self, nf: int, nx: int) -> None:
        super().__init__()
        self.nf, self.weight = nf, nn.Parameter(torch.randn(nx, nf))


class Experts(nn.Module):
    """A stack of expert weights."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(shape))


def batches(count: int, size: int = 16, seed: int = 0, dtype: torch.dtype = torch.float32) -> list[tuple[Tensor, Tensor]]:
    """Return random images and labels."""
    g = torch.Generator().manual_seed(seed)
    return [
        (torch.randn(size, 1, 8, 8, generator=g, dtype=dtype), torch.randint(10, (size,), generator=g)) for _ in range(count)
    ]


# ---- training


def entropy(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: tuple[Tensor, Tensor]) -> float:
    """Run the body of a user's training loop, which does not know about sparsity."""
    optimizer.zero_grad()
    loss = entropy(model, batch)
    loss.backward()
    optimizer.step()
    return loss.item()


def sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.SGD:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=1e-2)


def attach(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    method: str | Method = "optg",
    sparsity: float = 0.9,
    epochs: int = EPOCHS,
    steps: int = STEPS,
    **options: Any,
) -> tuple[torch.optim.Optimizer, optg.Sparsifier]:
    """Sparsify a model for a short run. Return its optimizer (SGD unless given) and its sparsifier."""
    optimizer = optimizer or sgd(model.parameters())
    sparsifier = optg.sparsify(model, optimizer, method, sparsity=sparsity, epochs=epochs, steps_per_epoch=steps, **options)
    return optimizer, sparsifier


def sparse_convnet(
    method: str | Method,
    make_optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] = sgd,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    **options: Any,
) -> tuple[nn.Sequential, torch.optim.Optimizer, optg.Sparsifier]:
    """Return a convnet with weights from a seed, its optimizer and its sparsifier. `options` are for `attach`."""
    torch.manual_seed(seed)
    model = convnet().to(dtype)
    return model, *attach(model, make_optimizer(model.parameters()), method, **options)


def prune_before_training(
    model: nn.Module, method: str | Method, sparsity: float, batches: Iterable[Any], loss: Callable[..., Tensor] = entropy
) -> optg.Sparsifier:
    """Return the sparsifier of a method that prunes before the first step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return attach(model, optimizer, method, sparsity, epochs=2, steps=1, loss=loss, batches=batches)[1]


def weights_of(model: nn.Module, sparsity: float = 0.5) -> SparseWeights:
    """Return the prunable weights of a model, without a sparsifier."""
    trained = [p for p in model.parameters() if p.requires_grad]
    return SparseWeights(find_prunable(model, None, ()), torch.optim.SGD(trained, lr=0.1), sparsity)


# ---- comparisons


def count_zeros(model: nn.Module) -> int:
    """Return how many entries of the weights (not the biases and norms) are exactly 0."""
    return sum(int((p == 0).sum()) for p in model.parameters() if p.ndim > 1)


def is_unchanged(model: nn.Module, before: dict[str, Tensor]) -> bool:
    """Return whether a model's state equals an earlier copy bit for bit."""
    return all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), before.values(), strict=True))


def smallest(scores: Tensor, count: int) -> Tensor:
    """Return a mask of the smallest scores, found by a stable sort: of equal scores, the first are taken."""
    found = torch.zeros(scores.numel(), dtype=torch.bool)
    found[scores.flatten().sort(stable=True).indices[:count]] = True
    return found.view(scores.shape)


def magnitude_zeros(values: list[Tensor], zeros: int) -> list[int]:
    """Return how many weights each layer loses in a global magnitude cut."""
    removed = smallest(torch.cat([v.flatten().abs() for v in values]), zeros)
    return [int(part.sum()) for part in removed.split([v.numel() for v in values])]


def printed(table: Table) -> str:
    """Return a table as rich prints it."""
    console = Console(width=120, file=io.StringIO(), record=True)
    console.print(table)
    return console.export_text()


def goal(method: str, model: nn.Module, sparsity: float) -> dict[str, float]:
    """Return the sparsity to ask of a method as an argument. `keep` asks for none: the model is made sparse before."""
    if method != "keep":
        return {"sparsity": 0.0 if method == "dense" else sparsity}
    for p in model.parameters():
        if p.ndim > 1:
            magnitude = p.detach().abs().double()
            p.data[magnitude < magnitude.quantile(sparsity)] = 0.0
    return {}
