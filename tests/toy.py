"""Small models and data that the tests share."""

import torch
from torch import Tensor, nn


def convnet(norm: bool = True) -> nn.Sequential:
    """Two convolutions and a classifier: 1,928 prunable weights."""
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


def batches(count: int, size: int = 16, seed: int = 0, dtype: torch.dtype = torch.float32) -> list[tuple[Tensor, Tensor]]:
    g = torch.Generator().manual_seed(seed)
    return [
        (torch.randn(size, 1, 8, 8, generator=g, dtype=dtype), torch.randint(10, (size,), generator=g)) for _ in range(count)
    ]


def entropy(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: tuple[Tensor, Tensor]) -> float:
    """The loop body of any user: nothing in it knows of sparsity."""
    optimizer.zero_grad()
    loss = entropy(model, batch)
    loss.backward()
    optimizer.step()
    return loss.item()


def goal(method: str, model: nn.Module, sparsity: float) -> dict[str, float]:
    """Return the sparsity to ask of a method as an argument. `keep` asks for none: the model is made sparse before."""
    if method != "keep":
        return {"sparsity": 0.0 if method == "dense" else sparsity}
    for p in model.parameters():
        if p.ndim > 1:
            magnitude = p.detach().abs().double()
            p.data[magnitude < magnitude.quantile(sparsity)] = 0.0
    return {}
