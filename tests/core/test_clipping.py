"""Gradient clipping by the norm that the weights receive."""

import pytest
import torch
from torch import nn

from tests.toy import EPOCHS, STEPS, attach, batches, convnet, mlp, step


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def test_the_norm_counts_only_gradients_that_weights_receive():
    model = mlp()
    optimizer, sparsifier = attach(model)
    for batch in batches(EPOCHS * STEPS):
        step(model, optimizer, batch)
    x, y = batches(1)[0]
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(x), y).backward()
    received = [p.grad * sparsifier.masks.get(n, True) for n, p in model.named_parameters()]
    expected = torch.cat([g.flatten() for g in received]).norm()
    dense = torch.cat([p.grad.flatten() for p in model.parameters()])
    assert sparsifier.clip_grad_norm_(1e9) == pytest.approx(float(expected))
    assert expected < 0.7 * dense.norm()
    sparsifier.clip_grad_norm_(float(expected) / 4)
    clipped = torch.cat([p.grad.flatten() for p in model.parameters()])
    assert torch.allclose(clipped, dense / 4, rtol=1e-4)
    mask = sparsifier.masks["1.weight"]
    model[1].weight.grad[~mask] = torch.inf  # no weight receives this gradient
    assert sparsifier.clip_grad_norm_(1e9) == pytest.approx(float(expected) / 4, rel=1e-4)
    assert model[1].weight.grad[mask].isfinite().all()


def test_without_gradients_the_norm_is_0():
    _, sparsifier = attach(convnet())
    assert sparsifier.clip_grad_norm_(1.0) == 0  # like torch.nn.utils.clip_grad_norm_
