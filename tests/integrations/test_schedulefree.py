"""Schedule-free optimizers have two sets of weights: `optimizer.eval()` shows averages of all steps."""

from typing import Any

import pytest
import schedulefree
import torch
from torch import nn

import optg
from tests.integrations.zeros import expected_zeros, zeros

CLASSES = [schedulefree.SGDScheduleFree, schedulefree.AdamWScheduleFree, schedulefree.RAdamScheduleFree]


@pytest.mark.parametrize("optimizer_class", CLASSES)
@pytest.mark.parametrize("method", ["optg", "gmp"])
def test_they_are_refused_with_the_methods_that_work(method: str, optimizer_class: Any) -> None:
    model = nn.Linear(8, 8)
    with pytest.raises(
        TypeError, match=rf"{optimizer_class.__name__} cannot train a sparse model .* Use method='rigl' or 'set'"
    ):
        optg.sparsify(model, optimizer_class(model.parameters(), lr=0.1), method, sparsity=0.9, steps=10)


@pytest.mark.parametrize("optimizer_class", CLASSES)
@pytest.mark.parametrize("method", ["rigl", "set"])
def test_the_averages_are_sparse(method: str, optimizer_class: Any) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 8))
    optimizer = optimizer_class(model.parameters(), lr=0.1)
    chosen = optg.methods.METHODS[method](every=5)
    sparsifier = optg.sparsify(model, optimizer, chosen, sparsity=0.9, steps=40)
    optimizer.train()
    for _ in range(40):
        optimizer.zero_grad()
        batch = torch.randn(16, 8)
        (model(batch) - batch).square().mean().backward()
        optimizer.step()
    optimizer.eval()
    sparsifier.finish()
    assert sparsifier.verify().ok and sparsifier.sparsity == pytest.approx(0.9, abs=2e-3)
    assert zeros(model) >= expected_zeros(model, 0.9)  # a weight that SET has grown behind a dead unit stays 0
