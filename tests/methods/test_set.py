"""SET: random growth on literal masks."""

import pytest
import torch
from torch import nn

import optg
from optg.methods import SET


def layer_with(values, mask, method, lr=0.0, momentum=0.0, sparsity=0.5):
    """Return a layer with the given weights and mask in a run of 100 steps, its optimizer and its sparsifier."""
    model = nn.Linear(values.shape[1], values.shape[0], bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum)
    sparsifier = optg.sparsify(model, optimizer, method, sparsity=sparsity, epochs=10, steps_per_epoch=10)
    set_weights(model, sparsifier, values, mask)
    return model, optimizer, sparsifier


def set_weights(model, sparsifier, values, mask):
    model.weight.data.copy_(values * mask)
    sparsifier.weights.masks[0].copy_(mask)


def exchange(model, optimizer, sparsifier, step, gradient=None):
    """Take one optimizer step with the clock at `step`. Return the new mask."""
    sparsifier.clock.step = step
    model.weight.grad = torch.zeros_like(model.weight) if gradient is None else gradient.clone()
    optimizer.step()
    return sparsifier.masks["weight"].clone()


VALUES = torch.tensor([[1.0, 8.0, 7.0, 2.0], [6.0, 0.1, 5.0, 9.0], [1.0, 1.0, 1.0, 1.0], [1.0, 1.0, 1.0, 1.0]])
MASK = torch.tensor([[1, 1, 1, 1], [1, 1, 1, 1], [0, 0, 0, 0], [0, 0, 0, 0]]).bool()
STAY = torch.tensor([[0, 1, 1, 1], [1, 0, 1, 1], [0, 0, 0, 0], [0, 0, 0, 0]]).bool()  # without the smallest, 1.0 and 0.1
TWO_OF_EIGHT = 0.25 / 0.95  # at step 14 of 100 the share is fraction · (1 + cos(0.14 π)) / 2 = 0.25


def test_the_smallest_magnitudes_are_dropped_and_all_others_are_grown_equally_often():
    grown = torch.zeros(4, 4)
    for seed in range(200):
        model, optimizer, sparsifier = layer_with(
            VALUES, MASK, SET(every=2, budget="uniform", fraction=TWO_OF_EIGHT, seed=seed)
        )
        new = exchange(model, optimizer, sparsifier, step=14)
        assert (new & STAY).equal(STAY) and new.sum() == 8
        assert not model.weight[new & ~MASK].any()
        assert model.weight[STAY].equal(VALUES[STAY])
        grown += new & ~STAY
    assert not grown[STAY].any()
    # Two of ten positions, 200 times: 40 on average, with a standard deviation of 5.7
    assert grown[~STAY].min() >= 20 and grown[~STAY].max() <= 60


def test_growth_depends_on_seed_and_step_but_not_on_the_gradient():
    torch.manual_seed(0)
    values, mask = torch.randn(16, 16), torch.rand(16, 16) < 0.5

    def grown(seed, step, gradient):
        parts = layer_with(values, mask, SET(every=2, budget="uniform", seed=seed))
        return exchange(*parts, step, gradient)

    expected = grown(seed=3, step=4, gradient=torch.randn(16, 16))
    assert torch.equal(expected, grown(seed=3, step=4, gradient=torch.randn(16, 16)))
    assert not torch.equal(expected, grown(seed=2, step=4, gradient=None))
    assert not torch.equal(expected, grown(seed=3, step=6, gradient=None))


def test_two_exchanges_of_a_run_grow_different_weights():
    torch.manual_seed(0)
    values, mask = torch.randn(16, 16), torch.rand(16, 16) < 0.5
    parts = model, _, sparsifier = layer_with(values, mask, SET(every=2, budget="uniform"))
    masks = []
    for step in (10, 12):
        set_weights(model, sparsifier, values, mask)
        masks.append(exchange(*parts, step))
    first, second = (m & ~mask for m in masks)
    assert first.any() and second.any() and not torch.equal(first, second)


def test_grown_weights_start_at_0_with_a_clean_momentum():
    torch.manual_seed(0)
    values, mask = torch.randn(16, 16), torch.rand(16, 16) < 0.5
    model, optimizer, sparsifier = layer_with(values, mask, SET(every=2, budget="uniform"), lr=0.1, momentum=0.9)
    optimizer.state[model.weight]["momentum_buffer"] = torch.full((16, 16), 5.0)
    gradient = torch.randn(16, 16)
    new = exchange(model, optimizer, sparsifier, 10, gradient) & ~mask
    assert new.sum() > 10
    assert torch.equal(model.weight[new], 0 - 0.1 * gradient[new])
    stayed = mask & sparsifier.masks["weight"]
    assert torch.allclose(model.weight[stayed], values[stayed] - 0.1 * (0.9 * 5.0 + gradient[stayed]))


def test_the_exchanged_share_follows_a_cosine_until_the_end_of_training(monkeypatch):
    torch.manual_seed(0)
    parts = _, _, sparsifier = layer_with(torch.randn(16, 16), torch.rand(16, 16) < 0.5, SET(every=25))
    shares = {}
    exchanged = sparsifier.weights.exchange

    def watch(share, scores):
        shares[sparsifier.clock.step] = share
        exchanged(share, scores)

    monkeypatch.setattr(sparsifier.weights, "exchange", watch)
    for step in range(100):
        exchange(*parts, step)
    # 0.5 · (1 + cos(π t / 100)) / 2, with cos(π/4) = 0.7071
    assert shares == pytest.approx({25: 0.426777, 50: 0.25, 75: 0.073223}, abs=1e-6)


def test_a_layer_without_gradients_is_unchanged():
    model = nn.ModuleDict({"used": nn.Linear(8, 8), "unused": nn.Linear(8, 8)})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sparsifier = optg.sparsify(model, optimizer, SET(every=2), sparsity=0.5, epochs=5, steps_per_epoch=4)
    before = {name: p.clone() for name, p in model.named_parameters()}
    for _ in range(20):
        optimizer.zero_grad()
        model["used"](torch.randn(4, 8)).square().mean().backward()
        optimizer.step()
    assert model["unused"].weight.equal(before["unused.weight"]) and sparsifier.sparsity == 0.5
    assert not model["used"].weight.equal(before["used.weight"])
