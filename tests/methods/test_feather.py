"""Feather: its threshold, and training against plain autograd."""

import copy
import math

import pytest
import torch
from torch import nn

import optg
from optg.core.passes.reference import power_threshold
from optg.core.ranking import zeros_at
from optg.methods import DPF, Feather
from tests.toy import batches, convnet, step

SGD = {"lr": 0.2, "momentum": 0.9, "weight_decay": 1e-2}
TOTAL = 16


def thresholded(weights, t, p=3.0, dtype=torch.float64):
    return power_threshold(torch.tensor(weights, dtype=dtype), torch.tensor(t, dtype=dtype), p)


# ---- the threshold


@pytest.mark.parametrize(
    "p, expected",
    [
        (1.0, [1.0, -3.0, 0.0, 0.0, 0.0]),
        (2.0, [math.sqrt(5), -math.sqrt(21), 0.0, 0.0, 0.0]),
        (3.0, [2.668402, -4.890973, 0.0, 0.0, 0.0]),  # the cube roots of 27 − 8 and 125 − 8
        (math.inf, [3.0, -5.0]),
    ],
)
def test_effective_weights_at_threshold_2(p, expected):
    kept_only = math.isinf(p)  # then the mask alone removes weights
    assert thresholded([3.0, -5.0] if kept_only else [3.0, -5.0, 2.0, -1.0, 0.0], 2.0, p).tolist() == pytest.approx(expected)


def test_effective_weights_follow_the_published_formula():
    torch.manual_seed(0)
    w, t = torch.randn(1000, dtype=torch.float64), torch.tensor(0.7, dtype=torch.float64)
    difference = w.abs() ** 3 - t**3
    published = torch.where(difference > 0, w.sign() * difference.clamp(min=0) ** (1 / 3), 0.0)
    assert torch.allclose(power_threshold(w, t, 3.0), published, rtol=1e-9, atol=1e-12)
    assert 400 < published.count_nonzero() < 600


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_at_threshold_0_weights_are_unchanged_bit_for_bit(dtype):
    w = torch.randn(1000).to(dtype)
    w[:3] = torch.tensor([0.0, -0.0, 1e-30])
    same = power_threshold(w, torch.zeros(()), 3.0)
    assert same.dtype == dtype and torch.equal(same, w) and torch.equal(same.signbit(), w.signbit())


@pytest.mark.parametrize("p", [1.0, 3.0])
def test_effective_weights_are_continuous_at_the_threshold(p):
    for t in (0.5, 1e-5):
        gaps = [10.0**-k for k in range(2, 13)]
        values = thresholded([t * (1 + gap) for gap in gaps], t, p) / t
        assert (values.diff() < 0).all() and (values > 0).all()
        assert values.tolist() == pytest.approx([((1 + gap) ** p - 1) ** (1 / p) for gap in gaps], rel=1e-3)
        assert thresholded([t, -t, t * (1 - 1e-9)], t, p).tolist() == [0.0, 0.0, 0.0]


def test_small_numbers_stay_exact_in_float32():
    # |w|³ is at most 1e-43, too small for a precise float32; |w| is not
    assert (thresholded([3e-15, -5e-15], 2e-15, dtype=torch.float32) * 1e15).tolist() == pytest.approx([2.668402, -4.890973])


# ---- training


@pytest.mark.parametrize("sparsity, share", [(0.5, 1.0), (0.9, 1.0), (0.95, 1.0), (0.951, 0.5), (0.99, 0.5)])
def test_theta_is_one_half_above_95_percent(sparsity, share):
    def dormant_gradient(method):
        model = convnet()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return optg.sparsify(model, optimizer, method, sparsity=sparsity, epochs=2, steps_per_epoch=4).method.dormant_gradient

    assert dormant_gradient(Feather()) == share
    assert dormant_gradient(Feather(theta=0.3)) == 0.3


class Threshold(torch.autograd.Function):
    """sign(w)·(|w|³ − t³)^⅓ of kept weights; in backward the gradient passes straight through, times θ for removed ones."""

    @staticmethod
    def forward(ctx, w, mask, t, theta):
        ctx.share = torch.ones_like(w).where(mask, theta)
        return torch.where(mask, w.sign() * (w.abs() ** 3 - t**3).clamp(min=0) ** (1 / 3), 0.0)

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.share, None, None, None


@pytest.mark.parametrize("sparsity, theta", [(0.97, 0.5), (0.9, 1.0)])
@pytest.mark.parametrize("every", [1, 4])
def test_training_equals_autograd_with_a_straight_through_threshold(sparsity, theta, every):
    torch.manual_seed(0)
    reference = convnet(norm=False).double()  # a norm would amplify rounding errors of filters near 0
    for layer in (0, 4, 7):
        nn.init.normal_(reference[layer].weight, std=0.2)  # so that no layer loses everything
    model = copy.deepcopy(reference)
    optimizer = torch.optim.SGD(model.parameters(), **SGD)
    sparsifier = optg.sparsify(model, optimizer, Feather(every=every), sparsity=sparsity, epochs=4, steps_per_epoch=4)

    latent = {n: p.detach().clone().requires_grad_() for n, p in reference.named_parameters()}
    masks, t = {n: torch.ones_like(latent[n], dtype=torch.bool) for n in sparsifier.masks}, torch.tensor(0.0)
    plain = torch.optim.SGD(latent.values(), **SGD)

    def seen():
        return {n: Threshold.apply(w, masks[n], t, theta) if n in masks and t > 0 else w for n, w in latent.items()}

    revived = 0
    for i, (x, y) in enumerate(batches(TOTAL, dtype=torch.float64), 1):
        step(model, optimizer, (x, y))
        plain.zero_grad()
        nn.functional.cross_entropy(torch.func.functional_call(reference, seen(), x), y).backward()
        plain.step()
        if i % every == 0:
            magnitudes = torch.cat([latent[n].detach().abs().flatten() for n in masks]).sort().values
            zeros = math.ceil(sparsity * (1 - (1 - min(i / (TOTAL / 2), 1)) ** 3) * len(magnitudes))
            t = magnitudes[zeros - 1]
            before, masks = masks, {n: latent[n].detach().abs() > t for n in masks}
            revived += sum(int((masks[n] & ~before[n]).sum()) for n in masks)
        now = dict(zip(masks, sparsifier.weights.latent))
        for n, p in model.named_parameters():
            assert torch.allclose(now.get(n, p), latent[n], rtol=0, atol=1e-11)
            assert torch.allclose(p, seen()[n], rtol=0, atol=1e-6)  # the root is steep at the threshold
        assert all(torch.equal(sparsifier.masks[n], masks[n]) for n in masks)
    assert revived > 20


@pytest.mark.parametrize("sparsity", [0.5, 0.9])
def test_exactly_the_requested_number_of_weights_is_0(sparsity):
    """A kept weight that falls below the last threshold becomes 0 too, so the last step must have a cut."""
    torch.manual_seed(0)
    model = convnet()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    sparsifier = optg.sparsify(model, optimizer, "feather", sparsity=sparsity, epochs=3, steps_per_epoch=10)
    for batch in batches(30):
        step(model, optimizer, batch)
    assert sum(int((v == 0).sum()) for v in sparsifier.weights.values) == zeros_at(sparsity, 1928)


def test_with_an_infinite_power_it_equals_dpf():
    def train(method):
        torch.manual_seed(0)
        model = convnet()
        optimizer = torch.optim.SGD(model.parameters(), **SGD)
        optg.sparsify(model, optimizer, method, sparsity=0.9, epochs=4, steps_per_epoch=4)
        for batch in batches(TOTAL):
            step(model, optimizer, batch)
        return model.state_dict().values()

    feather, dpf = (train(m) for m in (Feather(every=2, power=math.inf), DPF(every=2, end=0.5)))
    assert all(torch.equal(a, b) for a, b in zip(feather, dpf))


def test_weights_of_exactly_0_give_no_nan():
    torch.manual_seed(0)
    model = convnet()
    nn.init.zeros_(model[7].weight)
    model[4].weight.data[::2] = 0.0
    optimizer = torch.optim.SGD(model.parameters(), **SGD)
    sparsifier = optg.sparsify(
        model, optimizer, Feather(schedule="constant", every=1), sparsity=0.5, epochs=1, steps_per_epoch=4
    )
    for batch in [None, *batches(4)]:
        loss = 0.0 if batch is None else step(model, optimizer, batch)
        assert math.isfinite(loss) and all(v.isfinite().all() for v in model.state_dict().values())
        assert all(v.isfinite().all() for v in sparsifier.weights.latent)
