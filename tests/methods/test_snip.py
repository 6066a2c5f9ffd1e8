"""SNIP against plain autograd."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import optg
from optg.core.probe import Probe
from optg.methods import SNIP
from tests.toy import entropy, is_unchanged, prune_before_training, weights_of


def two_layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(10, 6), nn.Tanh(), nn.Linear(6, 5)).double()  # 60 and 30 weights


def data(*sizes: int) -> list:
    g = torch.Generator().manual_seed(1)
    return [(torch.randn(n, 10, generator=g).double(), torch.randint(5, (n,), generator=g)) for n in sizes]


def scores_by_hand(model, batches) -> list[torch.Tensor]:
    """Return |dL/dw · w| of both layers, where L is the cross-entropy averaged over batches."""
    w1, b1, w2, b2 = (p.detach().clone().requires_grad_() for p in model.parameters())
    total = 0.0
    for x, y in batches:
        out = torch.tanh(x @ w1.T + b1) @ w2.T + b2
        total = total + (out.logsumexp(1) - out[torch.arange(len(y)), y]).mean() / len(batches)
    total.backward()
    return [(w.grad * w).detach().abs() for w in (w1, w2)]


def mask_of_largest(scores: torch.Tensor, kept: int) -> torch.Tensor:
    mask = torch.zeros_like(scores, dtype=torch.bool)
    mask[scores.sort(descending=True).indices[:kept]] = True
    return mask


@pytest.mark.parametrize("count", [1, 3])
def test_scores_are_products_of_the_average_gradient_and_the_weight(count):
    model, batches = two_layers(), data(7, 3, 11)
    scores = SNIP(batches=count).saliency(weights_of(model), Probe(model, entropy, batches))
    for ours, theirs in zip(scores, scores_by_hand(model, batches[:count]), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=0)


@pytest.mark.parametrize("count", [1, 3])
def test_the_mask_ranks_both_layers_together(count):
    model, batches = two_layers(), data(7, 3, 11)
    before = copy.deepcopy(model)
    masks = prune_before_training(model, SNIP(batches=count), 0.8, batches).masks
    expected = mask_of_largest(torch.cat([s.flatten() for s in scores_by_hand(before, batches[:count])]), 18)
    assert torch.equal(torch.cat([m.flatten() for m in masks.values()]), expected)
    for p, old, name in zip(model.parameters(), before.parameters(), dict(model.named_parameters())):
        assert torch.equal(p, torch.where(masks[name], old, 0.0) if name in masks else old)
    others = mask_of_largest(torch.cat([s.flatten() for s in scores_by_hand(before, batches[: 4 - count])]), 18)
    assert not torch.equal(others, expected)  # another number of batches gives other masks


def test_two_layers_on_literal_numbers():
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 1, bias=False))
    model[0].weight.data = torch.tensor([[1.0, -2.0], [3.0, 4.0]])
    model[1].weight.data = torch.tensor([[2.0, -1.0]])
    sparsifier = prune_before_training(model, "snip", 0.5, [torch.ones(1, 2)], lambda model, x: model(x).sum())
    # L = v·Wx at x = (1, 1): |v_i x_j W_ij| = (2, 4; 3, 4) and |(Wx)_i v_i| = (|−1 · 2|, |7 · −1|). The 2, 2 and 3 go.
    assert [m.int().tolist() for m in sparsifier.masks.values()] == [[[0, 1], [0, 1]], [[0, 1]]]
    assert [p.tolist() for p in model.parameters()] == [[[0, -2], [0, 4]], [[0, -1]]]


@pytest.mark.parametrize(
    "budget, kept",
    [
        ("uniform", [30, 15]),  # half of 60 and half of 30
        ("erk", [27, 18]),  # 45 are kept as 10 + 6 : 6 + 5, that is 26.67 and 18.33
    ],
)
def test_under_a_budget_each_layer_keeps_its_own_largest(budget, kept):
    model, batches = two_layers(), data(7)
    scores = scores_by_hand(model, batches)
    masks = prune_before_training(model, SNIP(budget=budget), 0.5, batches).masks.values()
    for mask, score, count in zip(masks, scores, kept, strict=True):
        assert torch.equal(mask.flatten(), mask_of_largest(score.flatten(), count))
    together = mask_of_largest(torch.cat([s.flatten() for s in scores]), 45).split([60, 30])
    assert [int(m.sum()) for m in together] not in ([30, 15], [27, 18])  # a global ranking keeps other numbers


@pytest.mark.parametrize("method", ["snip", "grasp", "synflow"])
@pytest.mark.parametrize("given", [{}, {"loss": entropy}, {"batches": data(4)}], ids=["nothing", "loss", "batches"])
def test_without_loss_or_batches_the_error_says_what_to_give_and_nothing_changes(method, given):
    model = two_layers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError) as caught:
        optg.sparsify(model, optimizer, method, sparsity=0.5, epochs=2, steps_per_epoch=1, **given)
    assert str(caught.value).startswith(f"{method} needs data before training: give sparsify `loss`, a function of the model")
    assert "`batches`, such as the training loader" in str(caught.value)
    assert is_unchanged(model, before)
    assert all(p.grad is None for p in model.parameters())
    assert not optimizer._optimizer_step_pre_hooks and not optimizer._optimizer_step_post_hooks
    given = {"loss": entropy, "batches": data(4)}
    optg.sparsify(model, optimizer, method, sparsity=0.5, epochs=2, steps_per_epoch=1, **given)  # valid arguments still work


@pytest.mark.parametrize("batches", [[], iter([]), DataLoader([])], ids=["list", "iterator", "loader"])
def test_empty_batches_are_refused(batches):
    model = two_layers()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match="`batches` is empty; expected at least one batch"):
        prune_before_training(model, "snip", 0.5, batches)
    assert is_unchanged(model, before)


def test_fewer_batches_than_requested_are_averaged():
    model, batches = two_layers(), data(7, 3)
    scores = SNIP(batches=9).saliency(weights_of(model), Probe(model, entropy, batches))
    for ours, theirs in zip(scores, scores_by_hand(model, batches), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=0)


@pytest.mark.parametrize("options", [{"budget": "erc"}, {"batches": 0}, {"batches": -1}], ids=str)
def test_bad_options_are_refused_by_name(options):
    [(field, value)] = options.items()
    with pytest.raises(ValueError, match=rf"{field}.*{value!r}"):
        prune_before_training(two_layers(), SNIP(**options), 0.5, data(4))
