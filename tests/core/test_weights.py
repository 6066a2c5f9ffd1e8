"""SparseWeights: number types, memory layouts, writes from outside, and the magnitude budget."""

import copy
import math

import pytest
import torch
from torch import nn

from tests.toy import EPOCHS, STEPS, attach, batches, convnet, magnitude_zeros, step, weights_of


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def test_bfloat16_parameters_have_float32_scores():
    model = convnet(norm=False).bfloat16()
    optimizer, sparsifier = attach(model)
    for x, y in batches(EPOCHS * STEPS):
        step(model, optimizer, (x.bfloat16(), y))
    assert {s.dtype for kind in sparsifier.method.state.values() for s in kind} == {torch.float32}
    assert {v.dtype for v in sparsifier.weights.values} == {torch.bfloat16}


def test_channels_last_gives_the_same_masks():
    plain = convnet().double()
    last = copy.deepcopy(plain).to(memory_format=torch.channels_last)
    (plain_optimizer, expected), (optimizer, sparsifier) = attach(plain), attach(last)
    for x, y in batches(EPOCHS * STEPS, dtype=torch.float64):
        step(plain, plain_optimizer, (x, y))
        step(last, optimizer, (x.to(memory_format=torch.channels_last), y))
    assert sparsifier.weights.masks[1].is_contiguous(memory_format=torch.channels_last)
    for mask, other in zip(sparsifier.masks.values(), expected.masks.values()):
        assert torch.equal(mask, other)


def test_values_written_to_kept_weights_are_used_and_to_removed_ones_only_after_reload():
    model = convnet()
    optimizer, sparsifier = attach(model)
    for batch in batches(13):
        step(model, optimizer, batch)
    latent = [v.clone() for v in sparsifier.weights.latent]
    other = {n: torch.full_like(t, 0.01) if t.ndim > 1 else t for n, t in model.state_dict().items()}
    model.load_state_dict(other)  # dense: writes to removed weights too
    optimizer.param_groups[0]["lr"] = 0.0
    step(model, optimizer, batches(1)[0])
    for value, mask, now, before in zip(sparsifier.weights.values, sparsifier.weights.masks, sparsifier.weights.latent, latent):
        assert torch.equal(value, torch.where(mask, 0.01, 0.0))
        assert torch.equal(now[~mask], before[~mask])
    model.load_state_dict(other)
    sparsifier.reload()  # accepts the new values of removed weights too
    for value, mask, now in zip(sparsifier.weights.values, sparsifier.weights.masks, sparsifier.weights.latent):
        assert torch.equal(value, torch.where(mask, 0.01, 0.0)) and torch.equal(now, torch.full_like(now, 0.01))


# ---- the magnitude budget


@pytest.mark.parametrize("scales", [(1, 1, 1), (0.1, 1, 3), (5, 0.01, 1)])
@pytest.mark.parametrize("sparsity", [0.0, 0.3, 0.9, 0.999])
@pytest.mark.parametrize("digits", [1, 8])  # with 1 digit, many magnitudes are equal
def test_each_layer_loses_as_many_weights_as_in_a_global_magnitude_cut(scales, sparsity, digits):
    torch.manual_seed(0)
    model = convnet()
    weights = weights_of(model, sparsity)
    for value, scale in zip(weights.values, scales):
        value.mul_(10 * scale).copy_(value.mul(10**digits).round() / 10**digits)
    expected = magnitude_zeros(weights.values, math.ceil(sparsity * 1928))
    assert weights.zeros(sparsity, "magnitude")[0].tolist() == expected and sum(expected) == math.ceil(sparsity * 1928)


def test_magnitude_budget_on_literal_numbers():
    model = nn.Sequential(nn.Linear(3, 1, bias=False), nn.Linear(1, 3, bias=False))
    model[0].weight.data = torch.tensor([[-5.0, 0.1, 3.0]])
    model[1].weight.data = torch.tensor([[0.2], [-0.3], [4.0]])
    weights = weights_of(model)
    assert weights.zeros(0.5, "magnitude")[0].tolist() == [1, 2]
    # Scores other than the magnitudes decide which weights go: the first of three, and the last two.
    weights.cut([torch.tensor([[1.0, 2.0, 3.0]]), torch.tensor([[9.0], [8.0], [7.0]])], 0.5, "magnitude")
    assert [m.int().tolist() for m in weights.masks] == [[[0, 1, 1]], [[1], [0], [0]]]
