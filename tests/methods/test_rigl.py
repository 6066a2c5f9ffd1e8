import math

import pytest
import torch
from torch import nn

import optg
from optg.core.optimizer_state import clear_state
from optg.methods import RigL


def layer(values, mask, every=2, momentum=0.0, **options):
    """A 4×4 layer under RigL, with a mask and weights of our own."""
    model = nn.Linear(4, 4, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0, momentum=momentum)
    options = {"budget": "uniform", **options}
    sparsifier = optg.sparsify(model, optimizer, RigL(every=every, **options), sparsity=0.5, epochs=10, steps_per_epoch=10)
    with torch.no_grad():
        model.weight.copy_(values * mask)
    sparsifier.weights.masks[0].copy_(mask)
    return model, optimizer, sparsifier


VALUES = torch.tensor([[1.0, 8.0, 7.0, 2.0], [6.0, 0.1, 5.0, 9.0], [1.0, 1.0, 1.0, 1.0], [1.0, 1.0, 1.0, 1.0]])
MASK = torch.tensor([[1, 1, 1, 1], [1, 1, 1, 1], [0, 0, 0, 0], [0, 0, 0, 0]]).bool()
GRADIENT = torch.tensor([[0.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0], [0.1, -0.9, 0.2, 0.3], [0.4, 0.8, -0.5, 0.0]])


def test_drop_and_grow_on_a_4_by_4_mask():
    model, optimizer, sparsifier = layer(VALUES, MASK, fraction=0.25 / 0.95, end=1.0)
    sparsifier.clock.step = 14  # of 100: f = fraction · (1 + cos(0.14 π)) / 2 = 0.25, two of the eight kept weights move
    assert int(0.25 / 0.95 * (1 + math.cos(0.14 * math.pi)) / 2 * 8) == 2
    model.weight.grad = GRADIENT.clone()
    optimizer.step()
    # the two least in magnitude (1.0 and 0.1) go; the two steepest (−0.9 and 0.8) come, at 0
    assert sparsifier.masks["weight"].int().tolist() == [[0, 1, 1, 1], [1, 0, 1, 1], [0, 1, 0, 0], [0, 1, 0, 0]]
    assert model.weight.tolist() == [[0, 8, 7, 2], [6, 0, 5, 9], [0, 0, 0, 0], [0, 0, 0, 0]]
    assert sparsifier.weights.counts.tolist() == [[8, 2, 2]]


def test_a_weight_dropped_and_grown_at_once_stays():
    model, optimizer, sparsifier = layer(VALUES, MASK, fraction=0.25 / 0.95, end=1.0)
    sparsifier.clock.step = 14
    model.weight.grad = GRADIENT.clone()
    model.weight.grad[0, 0] = 5.0
    optimizer.step()
    assert sparsifier.masks["weight"].int().tolist() == [[1, 1, 1, 1], [1, 0, 1, 1], [0, 1, 0, 0], [0, 0, 0, 0]]
    assert model.weight[0, 0] == 1.0


def test_grown_weights_start_with_a_clean_optimizer_state():
    for cls in (torch.optim.SGD, torch.optim.Adam):
        torch.manual_seed(0)
        model = nn.Linear(16, 16)
        optimizer = cls(model.parameters(), lr=0.01, **({"momentum": 0.9} if cls is torch.optim.SGD else {}))
        sparsifier = optg.sparsify(model, optimizer, RigL(every=5), sparsity=0.5, epochs=4, steps_per_epoch=5)
        grown = 0
        for i in range(20):
            before = sparsifier.masks["weight"].clone()
            x = torch.randn(8, 16)
            optimizer.zero_grad()
            (model(x) - x).square().mean().backward()
            gradient = model.weight.grad.clone()
            old = {k: v.clone() for k, v in optimizer.state[model.weight].items() if k in ("momentum_buffer", "exp_avg")}
            optimizer.step()
            new = sparsifier.masks["weight"] & ~before
            grown += int(new.sum())
            for key, state in optimizer.state[model.weight].items():
                if key in old:
                    first = gradient * (1.0 if key == "momentum_buffer" else 0.1)  # of a state that began at 0
                    assert torch.allclose(state[new], first[new]), (cls, i)
                    assert not torch.allclose(state[before], first[before])
        assert grown > 0


@pytest.mark.parametrize("state", ["step_size", "sum"])
def test_a_clean_state_is_what_the_optimizer_begins_with(state):
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


def test_a_run_too_short_for_an_exchange_says_so():
    model = nn.Linear(16, 16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with pytest.warns(UserWarning, match="RigL exchanges weights every 100 steps until step 90 of 120: never"):
        optg.sparsify(model, optimizer, RigL(), sparsity=0.5, epochs=4, steps_per_epoch=30)


def test_layers_start_at_their_erk_budget_at_random():
    torch.manual_seed(0)
    masks = []
    for seed in (0, 0, 1):
        model = nn.Sequential(nn.Linear(30, 20, bias=False), nn.Linear(20, 5, bias=False))
        sparsifier = optg.sparsify(
            model, torch.optim.SGD(model.parameters(), lr=0.1), RigL(seed=seed), sparsity=0.8, epochs=2, steps_per_epoch=2
        )
        masks.append([m.clone() for m in sparsifier.masks.values()])
    # 140 of 700 stay; shares are 50 and 25 (sums of dimensions): 93 1/3 and 46 2/3
    assert [int(m.sum()) for m in masks[0]] == [93, 47]
    assert all(torch.equal(a, b) for a, b in zip(masks[0], masks[1]))
    assert not torch.equal(masks[0][0], masks[2][0])


def test_a_shrinking_budget_loses_its_smallest_weights_first():
    torch.manual_seed(0)
    model = nn.Linear(20, 20, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    method = RigL(every=2, schedule="linear", end=1.0)
    sparsifier = optg.sparsify(model, optimizer, method, sparsity=0.75, epochs=4, steps_per_epoch=2)
    kept = []
    for _ in range(8):
        model.weight.grad = torch.randn(20, 20)
        optimizer.step()
        kept.append(int(sparsifier.masks["weight"].sum()))
    assert kept == [400, 400, 325, 325, 250, 250, 100, 100]
