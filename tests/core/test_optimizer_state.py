"""The optimizer's state of single weights."""

import pytest
import torch
from torch import nn

import optg
from optg.core.optimizer_state import clear_state
from optg.methods import RigL


@pytest.mark.parametrize("state", ["step_size", "sum"])
def test_a_cleared_state_equals_the_optimizers_initial_state(state):
    model = nn.Linear(16, 16)
    if state == "sum":
        optimizer = torch.optim.Adagrad(model.parameters(), lr=0.01, initial_accumulator_value=0.1)
    else:
        optimizer = torch.optim.Rprop(model.parameters(), lr=0.01)
    sparsifier = optg.sparsify(model, optimizer, RigL(), sparsity=0.5, epochs=4, steps_per_epoch=100)
    (model(torch.randn(8, 16)).square().mean()).backward()
    optimizer.step()
    values = optimizer.state[model.weight][state]
    values.fill_(7.0)
    where = torch.rand(16, 16) < 0.5
    clear_state(sparsifier.optimizer, sparsifier.weights.parameters[0], 0, where)
    clean = torch.tensor({"step_size": 0.01, "sum": 0.1}[state])
    assert values.equal(torch.where(where, clean, torch.tensor(7.0)))
