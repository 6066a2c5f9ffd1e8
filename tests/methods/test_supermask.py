"""Supermask against plain autograd."""

import copy

import pytest
import torch
from torch import nn

import optg
from optg.methods import Supermask
from tests.toy import Conv1D, Experts, batches, convnet, step

TOTAL = 12
SGD = {"lr": 0.5, "momentum": 0.9, "weight_decay": 1e-2}
# At 90 %, 192 of 72 + 576 + 1280 weights are kept: 7.17, 57.36 and 127.47. The largest remainder is rounded up.
ZEROS = {"0.weight": 72 - 7, "4.weight": 576 - 57, "7.weight": 1280 - 128}


class Top(torch.autograd.Function):
    """Return 0 for the `zeros` smallest and 1 for the others; in backward the gradient passes straight through."""

    @staticmethod
    def forward(ctx, magnitudes, zeros):
        mask = torch.ones_like(magnitudes)
        mask.view(-1)[magnitudes.flatten().argsort()[:zeros]] = 0
        return mask

    @staticmethod
    def backward(ctx, grad):
        return grad, None


def test_scores_and_masks_equal_those_of_autograd():
    torch.manual_seed(0)
    reference = convnet().double()
    model = copy.deepcopy(reference)
    optimizer = torch.optim.SGD(model.parameters(), **SGD)
    sparsifier = optg.sparsify(model, optimizer, Supermask(momentum=0.8, decay=0.01), sparsity=0.9, epochs=3, steps_per_epoch=4)

    weights = {n: p.detach().clone() for n, p in reference.named_parameters()}
    scores = {n: s.clone().requires_grad_() for n, s in zip(ZEROS, sparsifier.method.state["scores"])}
    rest = {n: w.requires_grad_() for n, w in weights.items() if n not in scores}
    plain = torch.optim.SGD(
        [{"params": rest.values()}, {"params": scores.values(), "momentum": 0.8, "weight_decay": 0.01}], **SGD
    )
    moved = 0
    for batch in [None, *batches(TOTAL, dtype=torch.float64)]:
        if batch is not None:
            step(model, optimizer, batch)
            plain.zero_grad()
            masked = {n: weights[n] * Top.apply(s.abs(), ZEROS[n]) for n, s in scores.items()}
            nn.functional.cross_entropy(
                torch.func.functional_call(reference, {**rest, **masked}, batch[0]), batch[1]
            ).backward()
            before = {n: Top.apply(s.detach().abs(), ZEROS[n]).bool() for n, s in scores.items()}
            plain.step()
        for (n, expected), score in zip(scores.items(), sparsifier.method.state["scores"], strict=True):
            mask = Top.apply(expected.detach().abs(), ZEROS[n]).bool()
            assert torch.allclose(score, expected, rtol=0, atol=1e-12)
            assert torch.equal(sparsifier.masks[n], mask)
            assert int((~mask).sum()) == ZEROS[n]
            assert torch.equal(model.get_parameter(n), weights[n] * mask)
            moved += 0 if batch is None else int((mask != before[n]).sum())
        for n, w in rest.items():
            assert torch.allclose(model.get_parameter(n), w, rtol=0, atol=1e-12)
    assert moved > 20


@pytest.mark.parametrize(
    "optimizer",
    [
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1),
        lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.1),
    ],
)
def test_prunable_weights_never_change_and_all_others_do(optimizer):
    torch.manual_seed(0)
    model = convnet()
    first = {n: p.detach().clone() for n, p in model.named_parameters()}
    opt = optimizer(model.parameters())
    sparsifier = optg.sparsify(model, opt, "supermask", sparsity=0.5, epochs=3, steps_per_epoch=4)
    for batch in batches(TOTAL):
        step(model, opt, batch)
        for latent, (n, mask) in zip(sparsifier.weights.latent, sparsifier.masks.items()):
            assert torch.equal(latent, first[n])
            assert torch.equal(model.get_parameter(n), first[n].where(mask, 0.0))
    for n in set(first) - set(sparsifier.masks):
        assert not torch.equal(model.get_parameter(n), first[n]), n


def test_first_scores_are_uniform_within_one_over_root_fan_in_and_depend_on_the_seed():
    def first(seed):
        torch.manual_seed(7)
        model = convnet()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        sparsifier = optg.sparsify(model, optimizer, Supermask(seed=seed), sparsity=0.5, epochs=1, steps_per_epoch=2)
        return sparsifier.method.state["scores"]

    for score, fan_in in zip(first(0), (9, 72, 128)):
        bound = fan_in**-0.5
        assert 0.9 * bound < score.max() <= bound and -bound <= score.min() < -0.9 * bound
        assert score.std().item() == pytest.approx(bound / 3**0.5, rel=0.1)
    assert torch.equal(first(0)[1], first(0)[1]) and not torch.equal(first(0)[1], first(1)[1])


@pytest.mark.parametrize(
    ("layer", "fan_in"),
    [(nn.ConvTranspose2d(4, 24, 3), 4 * 9), (Conv1D(60, 9), 9), (Experts(8, 20, 12), 12), (nn.GRU(16, 10), 16)],
)
def test_the_fan_in_follows_the_output_dimension(layer, fan_in):
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    sparsifier = optg.sparsify(layer, optimizer, Supermask(), sparsity=0.5, epochs=1, steps_per_epoch=2)
    score, bound = sparsifier.method.state["scores"][0], fan_in**-0.5
    assert 0.95 * bound < score.max() <= bound


def test_first_scores_by_magnitude_keep_the_largest_weights():
    torch.manual_seed(7)
    model = convnet()
    weights = {n: model.get_parameter(n).detach().clone() for n in ZEROS}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    method = Supermask(first="magnitude")
    sparsifier = optg.sparsify(model, optimizer, method, sparsity=0.9, epochs=1, steps_per_epoch=2)
    for (n, w), score in zip(weights.items(), sparsifier.method.state["scores"], strict=True):
        largest = Top.apply(w.abs(), ZEROS[n])
        torch.testing.assert_close(score, 0.99 + 0.01 * largest)
        assert torch.equal(sparsifier.masks[n], largest.bool())
    with pytest.raises(ValueError, match="unknown first 'magnitud'; did you mean 'magnitude'"):
        Supermask(first="magnitud")


def test_signed_constant_weights_have_the_published_scale():
    torch.manual_seed(0)
    model = nn.Linear(8, 4, bias=False)
    signs = model.weight.detach().sign()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sparsifier = optg.sparsify(model, optimizer, Supermask(signed_constant=True), sparsity=0.75, epochs=1, steps_per_epoch=3)
    # √(2 / (fan-in · kept share)) = √(2 / (8 · 1/4)) = 1
    torch.testing.assert_close(sparsifier.weights.latent[0], signs)
    torch.testing.assert_close(model.weight.data, signs * sparsifier.masks["weight"])
    assert int(sparsifier.masks["weight"].sum()) == 8
