"""SNIP, against the net and its loss written out in plain autograd."""

import copy
import warnings

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import optg
from optg.core.probe import Probe
from optg.core.prunable import find_prunable
from optg.core.weights import SparseWeights
from optg.methods import SNIP


def two_layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(10, 6), nn.Tanh(), nn.Linear(6, 5)).double()  # 60 and 30 weights


def data(*sizes: int) -> list:
    g = torch.Generator().manual_seed(1)
    return [(torch.randn(n, 10, generator=g).double(), torch.randint(5, (n,), generator=g)) for n in sizes]


def loss(model, batch):
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def attach(model, method="snip", sparsity=0.5, **given):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return optg.sparsify(model, optimizer, method, sparsity=sparsity, epochs=2, steps_per_epoch=1, **given)


def by_hand(model, batches) -> list[torch.Tensor]:
    """|dL/dw · w| of both layers, L being the mean over batches of the mean cross-entropy."""
    w1, b1, w2, b2 = (p.detach().clone().requires_grad_() for p in model.parameters())
    total = 0.0
    for x, y in batches:
        out = torch.tanh(x @ w1.T + b1) @ w2.T + b2
        total = total + (out.logsumexp(1) - out[torch.arange(len(y)), y]).mean() / len(batches)
    total.backward()
    return [(w.grad * w).detach().abs() for w in (w1, w2)]


def keep(scores: torch.Tensor, kept: int) -> torch.Tensor:
    mask = torch.zeros_like(scores, dtype=torch.bool)
    mask[scores.sort(descending=True).indices[:kept]] = True
    return mask


@pytest.mark.parametrize("count", [1, 3])
def test_scores_are_the_products_of_gradient_and_weight_averaged_over_batches(count):
    model, batches = two_layers(), data(7, 3, 11)
    weights = SparseWeights(find_prunable(model, None, ()), torch.optim.SGD(model.parameters(), lr=0.1), 0.5)
    scores = SNIP(batches=count).saliency(weights, Probe(model, loss, batches))
    for ours, theirs in zip(scores, by_hand(model, batches[:count]), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=0)


@pytest.mark.parametrize("count", [1, 3])
def test_the_mask_ranks_both_layers_together(count):
    model, batches = two_layers(), data(7, 3, 11)
    before = copy.deepcopy(model)
    masks = attach(model, SNIP(batches=count), sparsity=0.8, loss=loss, batches=batches).masks
    expected = keep(torch.cat([s.flatten() for s in by_hand(before, batches[:count])]), 18)
    assert torch.equal(torch.cat([m.flatten() for m in masks.values()]), expected)
    for p, old, name in zip(model.parameters(), before.parameters(), dict(model.named_parameters())):
        assert torch.equal(p, torch.where(masks[name], old, 0.0) if name in masks else old)
    others = keep(torch.cat([s.flatten() for s in by_hand(before, batches[: 4 - count])]), 18)
    assert not torch.equal(others, expected)  # so this would notice another number of batches


def test_two_layers_on_literal_numbers():
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 1, bias=False))
    model[0].weight.data = torch.tensor([[1.0, -2.0], [3.0, 4.0]])
    model[1].weight.data = torch.tensor([[2.0, -1.0]])
    sparsifier = attach(model, loss=lambda model, x: model(x).sum(), batches=[torch.ones(1, 2)])
    # L = v·Wx at x = (1, 1): |v_i x_j W_ij| = (2, 4; 3, 4) and |(Wx)_i v_i| = (|−1 · 2|, |7 · −1|). The 2, 2 and 3 go.
    assert [m.int().tolist() for m in sparsifier.masks.values()] == [[[0, 1], [0, 1]], [[0, 1]]]
    assert [p.tolist() for p in model.parameters()] == [[[0, -2], [0, 4]], [[0, -1]]]


@pytest.mark.parametrize(
    "budget, kept",
    [
        ("uniform", [30, 15]),  # half of 60 and of 30
        ("erk", [27, 18]),  # 45 as 10 + 6 to 6 + 5: 26.67 and 18.33
    ],
)
def test_under_a_budget_each_layer_keeps_its_own_largest(budget, kept):
    model, batches = two_layers(), data(7)
    scores = by_hand(model, batches)
    masks = attach(model, SNIP(budget=budget), loss=loss, batches=batches).masks.values()
    for mask, score, count in zip(masks, scores, kept, strict=True):
        assert torch.equal(mask.flatten(), keep(score.flatten(), count))
    together = keep(torch.cat([s.flatten() for s in scores]), 45).split([60, 30])
    assert [int(m.sum()) for m in together] not in ([30, 15], [27, 18])  # a global ranking is something else


def test_a_layer_that_loses_everything_is_named():
    model = nn.Sequential(nn.Linear(1, 4, bias=False), nn.Linear(4, 4, bias=False), nn.Linear(4, 1, bias=False))
    for p in model.parameters():
        nn.init.ones_(p)
    # L = 16, the sum over paths, of which 4 pass through each weight of the outer layers and 1 through each of the 16 between
    with pytest.warns(UserWarning) as caught:
        sparsifier = attach(model, sparsity=2 / 3, loss=lambda model, x: model(x).sum(), batches=[torch.ones(1, 1)])
    named = "layer collapse: snip has removed all 16 weights of 1.weight at step 0. "
    assert [str(w.message) for w in caught] == [f"{named}sparsify(..., floor=0.02) keeps 2 % of every layer"]
    assert caught[0].filename == __file__  # it points at the caller of sparsify
    assert [int(m.sum()) for m in sparsifier.masks.values()] == [4, 0, 4]
    with warnings.catch_warnings(action="error"):  # once is enough
        for _ in range(2):
            model(torch.ones(1, 1)).backward()
            sparsifier.optimizer.step()


@pytest.mark.parametrize("method", ["snip", "grasp", "synflow"])
@pytest.mark.parametrize("given", [{}, {"loss": loss}, {"batches": data(4)}], ids=["nothing", "loss", "batches"])
def test_without_data_the_error_says_what_to_give_and_nothing_has_changed(method, given):
    model = two_layers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError) as caught:
        optg.sparsify(model, optimizer, method, sparsity=0.5, epochs=2, steps_per_epoch=1, **given)
    assert "give sparsify `loss`, a function of the model and a batch" in str(caught.value)
    assert "`batches`, such as the training loader" in str(caught.value)
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), before.values()))
    assert all(p.grad is None for p in model.parameters())
    assert not optimizer._optimizer_step_pre_hooks and not optimizer._optimizer_step_post_hooks
    given = {"loss": loss, "batches": data(4)}
    optg.sparsify(model, optimizer, method, sparsity=0.5, epochs=2, steps_per_epoch=1, **given)  # it can still be done right


@pytest.mark.parametrize("batches", [[], iter([]), DataLoader([])], ids=["list", "iterator", "loader"])
def test_no_batch_is_an_error(batches):
    model = two_layers()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match="`batches` is empty; expected at least one batch"):
        attach(model, loss=loss, batches=batches)
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), before.values()))


def test_fewer_batches_than_asked_for_are_averaged_as_they_are():
    model, batches = two_layers(), data(7, 3)
    weights = SparseWeights(find_prunable(model, None, ()), torch.optim.SGD(model.parameters(), lr=0.1), 0.5)
    for ours, theirs in zip(SNIP(batches=9).saliency(weights, Probe(model, loss, batches)), by_hand(model, batches)):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=0)


@pytest.mark.parametrize("options", [{"budget": "erc"}, {"batches": 0}, {"batches": -1}], ids=str)
def test_bad_options_are_refused_by_name(options):
    [(field, value)] = options.items()
    with pytest.raises(ValueError, match=rf"{field}.*{value!r}"):
        attach(two_layers(), SNIP(**options), loss=loss, batches=data(4))
