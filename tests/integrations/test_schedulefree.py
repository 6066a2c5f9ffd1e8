"""Schedule-free optimizers have two sets of weights: `optimizer.eval()` shows averages of all steps."""

import warnings
from typing import Any

import pytest
import pytorch_optimizer
import schedulefree
import torch
from torch import nn

import optg
from tests.integrations.zeros import expected_zeros, zeros

CLASSES = [schedulefree.SGDScheduleFree, schedulefree.AdamWScheduleFree, schedulefree.RAdamScheduleFree]
ALL = [*CLASSES, pytorch_optimizer.ScheduleFreeAdamW, pytorch_optimizer.ScheduleFreeSGD, pytorch_optimizer.SPlus]


@pytest.mark.parametrize("optimizer_class", CLASSES)
@pytest.mark.parametrize("method", ["optg", "gmp"])
def test_they_are_refused_with_the_methods_that_work(method: str, optimizer_class: Any) -> None:
    model = nn.Linear(8, 8)
    with pytest.raises(
        TypeError, match=rf"{optimizer_class.__name__} cannot train a sparse model .* Use method='rigl' or 'set'"
    ):
        optg.sparsify(model, optimizer_class(model.parameters(), lr=0.1), method, sparsity=0.9, steps=10)


@pytest.mark.parametrize("optimizer_class", ALL)
@pytest.mark.parametrize("method", ["rigl", "set", "keep"])
def test_both_sets_of_weights_are_sparse(method: str, optimizer_class: Any) -> None:
    """Whenever `eval` is called: in the middle of training, before `finish`, and after it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 8))
    optimizer = optimizer_class(model.parameters(), lr=0.01)
    if method == "keep":
        model[0].weight.data[torch.rand(32, 8) < 0.8] = 0.0
        sparsifier = optg.sparsify(model, optimizer, "keep")
    else:
        chosen = optg.methods.METHODS[method](every=5)
        sparsifier = optg.sparsify(model, optimizer, chosen, sparsity=0.9, steps=40)
    optimizer.train()
    for step in range(40):
        optimizer.zero_grad()
        batch = torch.randn(16, 8)
        (model(batch) - batch).square().mean().backward()
        optimizer.step()
        if step % 7 == 0:
            assert sparsifier.verify().ok
            optimizer.eval()
            assert sparsifier.verify().ok, "the average of all steps is dense"
            optimizer.train()
    with warnings.catch_warnings(action="error"):
        sparsifier.finish()
    before = zeros(model)
    optimizer.eval()
    assert sparsifier.verify().ok
    if method == "keep":
        assert zeros(model) == before == sum(int((~mask).sum()) for mask in sparsifier.masks.values())
    else:
        assert zeros(model) >= expected_zeros(model, 0.9)  # a weight that SET has grown behind a dead unit stays 0
