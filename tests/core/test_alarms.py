"""Warnings: a collapsed layer, and a sparsity other than the target at the end."""

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
