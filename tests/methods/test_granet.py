"""GraNet on literal masks and budgets."""

from dataclasses import replace

import pytest
import torch
from torch import nn

import optg
from optg.core.clock import Clock
from optg.methods import GraNet


def test_sparsity_follows_the_cubic_and_reaches_the_target_at_half_of_training():
    torch.manual_seed(0)
    model = nn.Linear(20, 20, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    sparsifier = optg.sparsify(model, optimizer, GraNet(every=10), sparsity=0.9, epochs=10, steps_per_epoch=10)
    zeros, masks = [], [sparsifier.masks["weight"].clone()]
    for _ in range(100):
        zeros.append(int((~masks[-1]).sum()))
        model.weight.grad = torch.randn(20, 20)
        optimizer.step()
        masks.append(sparsifier.masks["weight"].clone())
    # 0.5 + 0.4 · (1 − (1 − t / 50)³) of 400, rounded up, for t = 10 … 50: 0.6952, 0.8136, 0.8744, 0.8968, 0.9. The mask at t
    # uses the gradient of the next step.
    assert zeros == [200] * 11 + [279] * 10 + [326] * 10 + [350] * 10 + [359] * 10 + [360] * 49
    changed = [t for t in range(100) if not torch.equal(masks[t], masks[t + 1])]
    assert changed == [10, 20, 30, 40, 50, 60, 70, 80]  # exchanges continue; at 90 the share of 40 weights rounds to none


@pytest.mark.parametrize("sparsity, kept", [(0.9, [250, 100]), (0.2, [460, 100])])
def test_the_first_mask_is_random_with_erk_budgets_at_half_density(sparsity, kept):
    def first(seed):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(30, 20, bias=False), nn.Linear(20, 5, bias=False))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        sparsifier = optg.sparsify(model, optimizer, GraNet(seed=seed), sparsity=sparsity, epochs=2, steps_per_epoch=2)
        return list(sparsifier.masks.values())

    # 350 of 700 are kept as 50 : 25 (sums of dimensions). The second layer would keep 116 2/3 of its 100 weights, so it is
    # kept whole. A target below one half is met from the start.
    assert [int(m.sum()) for m in first(0)] == kept
    assert torch.equal(first(0)[0], first(0)[0]) and not torch.equal(first(0)[0], first(1)[0])


def test_all_layers_are_cut_together_before_each_layer_exchanges():
    model = nn.Sequential(nn.Linear(8, 1, bias=False), nn.Linear(8, 1, bias=False))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    method = GraNet(every=2, fraction=0.6)
    sparsifier = optg.sparsify(model, optimizer, method, sparsity=0.75, epochs=2, steps_per_epoch=10)
    for i, values in enumerate([[1.0, 2, 3, 4, 0, 0, 0, 0], [0.1, 0.2, 0.3, 5, 0, 0, 0, 0]]):
        model[i].weight.data.copy_(torch.tensor([values]))
        sparsifier.weights.masks[i].copy_(torch.tensor([values]) != 0)
    sparsifier.clock.step = 2
    model[0].weight.grad = torch.tensor([[0.0, 0, 0, 0, 0.1, -0.9, 0.8, 0]])
    model[1].weight.grad = torch.tensor([[0.7, 0, 0, 0, 0.1, 0, 0, 0.2]])
    optimizer.step()
    # 0.5 + 0.25 · (1 − (1 − 2/10)³) = 0.622 of 16 weights are ten: two more go, 0.1 and 0.2, both of the second layer.
    # Then the share is 0.6 · (1 + cos(0.2 π)) / 2 = 0.54: two of the first layer's four, one of the second's two. The first
    # drops 1 and 2 and grows where the gradient is −0.9 and 0.8; the second drops 0.3 and grows where it is 0.7, and 0.1 was.
    assert [m[0].int().tolist() for m in sparsifier.masks.values()] == [[0, 0, 1, 1, 0, 1, 1, 0], [1, 0, 0, 1, 0, 0, 0, 0]]
    assert [layer.weight.tolist()[0] for layer in model] == [[0, 0, 3, 4, 0, 0, 0, 0], [0, 0, 0, 5, 0, 0, 0, 0]]


def test_exchanges_continue_until_the_end_of_training():
    clock = Clock(epochs=10, steps_per_epoch=20)
    due = {until: [s for s in range(200) if GraNet(every=10, until=until).due(replace(clock, step=s))] for until in (1.0, 0.5)}
    assert due == {1.0: list(range(10, 200, 10)), 0.5: list(range(10, 101, 10))}
    with pytest.raises(ValueError, match=r"until is 0\.4; expected at least `end`, 0\.5"):
        GraNet(until=0.4)


def test_the_exchanged_share_falls_to_0_at_the_end(monkeypatch):
    model = nn.Linear(64, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    sparsifier = optg.sparsify(model, optimizer, GraNet(every=10), sparsity=0.9, epochs=10, steps_per_epoch=20)
    shares = []
    monkeypatch.setattr(sparsifier.weights, "exchange", lambda share, scores: shares.append(round(share, 3)))
    for _ in range(200):
        model(torch.randn(4, 64)).square().mean().backward()
        optimizer.step()
    assert len(shares) == 19 and shares[0] == 0.497 and shares[9] == 0.25 and shares[-1] == 0.003
