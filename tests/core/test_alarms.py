"""Warnings: a collapsed layer, and a sparsity other than the target at the end."""

import copy
import warnings

import pytest
import torch
from torch import nn

import optg
from optg.methods import STR
from tests.toy import EPOCHS, STEPS, attach, batches, convnet, count_zeros, step


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def prune_with_snip(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    given = {"loss": lambda model, x: model(x).sum(), "batches": [torch.ones(1, 1)]}
    return optg.sparsify(model, optimizer, "snip", sparsity=2 / 3, epochs=2, steps_per_epoch=1, **given)


def test_a_collapsed_layer_is_warned_about_once():
    model = nn.Sequential(nn.Linear(1, 4, bias=False), nn.Linear(4, 4, bias=False), nn.Linear(4, 1, bias=False))
    for p in model.parameters():
        nn.init.ones_(p)
    # L = 16 is the number of paths. 4 pass through each weight of the outer layers, 1 through each of the 16 between them.
    with pytest.warns(UserWarning) as caught:
        sparsifier = prune_with_snip(model)
    named = "layer collapse: snip has removed all 16 weights of 1.weight at step 0. "
    assert [str(w.message) for w in caught] == [f"{named}sparsify(..., floor=0.02) keeps 2 % of every layer"]
    assert caught[0].filename == __file__  # the warning points at the user's code
    assert [int(m.sum()) for m in sparsifier.masks.values()] == [4, 0, 4]
    with warnings.catch_warnings(action="error"):  # each layer is warned about only once
        for _ in range(2):
            model(torch.ones(1, 1)).backward()
            sparsifier.optimizer.step()


def test_the_floor_in_the_warning_leaves_room_for_the_sparsity():
    model = nn.Sequential(nn.Linear(8, 40, bias=False), nn.Linear(40, 40, bias=False))
    nn.init.constant_(model[1].weight, 1e-6)
    optimizer, at_once = torch.optim.SGD(model.parameters(), lr=0.1), optg.methods.GMP(schedule="constant")
    other = copy.deepcopy(model)
    with pytest.warns(UserWarning, match=r"collapse: gmp .* 1\.weight .*floor=0\.004\) keeps 0\.4 % of every layer"):
        optg.sparsify(model, optimizer, at_once, sparsity=0.98, steps=10)
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    with warnings.catch_warnings(action="error"):
        optg.sparsify(other, optimizer, at_once, sparsity=0.98, steps=10, floor=0.004)


class Attention(nn.Module):
    """One token attends to itself: the gradients of its query and key are 0."""

    def __init__(self, width: int = 4):
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width, bias=False)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        return (q * k).sum(-1, keepdim=True).softmax(-1) * v


def test_a_collapsed_part_of_a_layer_is_warned_about():
    model = Attention()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    given = {"loss": lambda model, x: model(x).sum(), "batches": [torch.ones(1, 4)]}
    with pytest.warns(UserWarning) as caught:  # the scores |g·w| of query and key are 0
        optg.sparsify(model, optimizer, "snip", sparsity=2 / 3, epochs=2, steps_per_epoch=1, **given)
    named = "layer collapse: snip has removed all weights of part 1, 2 of 3 of qkv.weight at step 0. "
    assert [str(w.message) for w in caught] == [f"{named}sparsify(..., floor=0.02) keeps 2 % of every layer"]
    model = Attention()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with warnings.catch_warnings(action="error"):
        optg.sparsify(model, optimizer, "snip", sparsity=2 / 3, epochs=2, steps_per_epoch=1, floor=0.02, **given)
    assert all(part.count_nonzero() >= 1 for part in model.qkv.weight.chunk(3))


def test_the_last_cut_of_finish_warns_of_a_collapsed_layer():
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    nn.init.constant_(model[0].weight, 0.1)
    nn.init.ones_(model[1].weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    sparsifier = optg.sparsify(model, optimizer, "gmp", sparsity=0.5, epochs=10, steps_per_epoch=1)
    with pytest.warns(UserWarning) as caught:
        sparsifier.finish()
    assert "One last cut" in str(caught[0].message)
    assert "layer collapse: gmp has removed all 16 weights of 0.weight at step 0." in str(caught[1].message)
    assert caught[1].filename == __file__


def test_finishing_early_cuts_to_the_target_with_a_warning():
    model = convnet()
    optimizer, sparsifier = attach(model)
    for batch in batches(7):
        step(model, optimizer, batch)
    with pytest.warns(UserWarning) as caught:
        sparsifier.finish()
    [warning] = caught
    for part in ("7 optimizer steps were seen", "20 were announced", "steps_per_epoch=5, which counts optimizer steps"):
        assert part in str(warning.message)
    assert count_zeros(model) == 1736 and sparsifier.sparsity == 1736 / 1928


def test_finish_warns_if_a_learned_sparsity_misses_the_target():
    model = convnet()
    optimizer, sparsifier = attach(model, method=STR())
    for batch in batches(EPOCHS * STEPS):
        step(model, optimizer, batch)
    with pytest.warns(UserWarning, match=r"ended at sparsity 0\.0000, not 0\.9: str learns its sparsity, .*decay=None"):
        sparsifier.finish()


@pytest.mark.parametrize("in_optimizer", [True, False])
def test_weights_that_are_unfrozen_during_training_are_named(in_optimizer):
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 2))
    model[:2].requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters() if in_optimizer else model[2].parameters(), lr=0.1)
    optg.sparsify(model, optimizer, "gmp", sparsity=0.5, steps=10)
    with warnings.catch_warnings(action="error"):
        train_once(model, optimizer)
    model[1].requires_grad_(True)
    if not in_optimizer:
        optimizer.add_param_group({"params": list(model[1].parameters())})
    with pytest.warns(UserWarning, match=r"frozen when sparsify was called .* stay dense: 1\.weight\. To"):
        train_once(model, optimizer)
    with warnings.catch_warnings(action="error"):  # only once
        train_once(model, optimizer)


class Unknown(nn.Module):
    """A layer of a class that optg does not prune by default."""

    def __init__(self):
        super().__init__()
        self.matrix = nn.Parameter(torch.randn(4, 8))

    def forward(self, x):
        return x @ self.matrix


@pytest.mark.parametrize(("options", "named"), [({}, True), ({"include": [..., "1.*"]}, True), ({"include": "1.*"}, False)])
def test_unfrozen_weights_of_unknown_classes_are_named_unless_the_user_left_them_out(options, named):
    model = nn.Sequential(Unknown(), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model[0].requires_grad_(False)
    optg.sparsify(model, optimizer, "gmp", sparsity=0.5, steps=10, **options)
    model[0].requires_grad_(True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train_once(model, optimizer)
    assert any("so they stay dense: 0.matrix" in str(warning.message) for warning in caught) == named


def train_once(model, optimizer):
    optimizer.zero_grad()
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
