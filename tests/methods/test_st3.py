"""ST-3 and ST-3σ against the published formulas and plain autograd."""

import copy
import math

import pytest
import torch
from torch import nn

import optg
from optg.methods import ST3, ST3Sigma
from tests.toy import Conv1D, Experts, batches, convnet, step

SGD = {"lr": 0.2, "momentum": 0.9, "weight_decay": 1e-2}
TOTAL = 20


def cut_layers(cls: type[ST3], values: list, zeros: int, **options):
    """Return layers with the given weights, cut before the first step, and their sparsifier."""
    model = nn.Sequential(*[nn.Linear(len(v[0]), len(v), bias=False) for v in values]).double()
    for layer, v in zip(model, values):
        layer.weight.data.copy_(torch.as_tensor(v, dtype=torch.float64))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    sparsity = zeros / sum(p.numel() for p in model.parameters())
    method = cls(schedule="constant", **options)
    return model, optg.sparsify(model, optimizer, method, sparsity=sparsity, epochs=1, steps_per_epoch=9)


def published(w, t, mask, rescale=True, filters=(0,)):
    """Return (w − sign(w)·t) of kept weights, times 1.01 / (kept + 0.01) per filter; kept = mean|w·mask| / mean|w|."""
    dims = tuple(dim for dim in range(w.ndim) if dim not in filters)
    kept = (w * mask).abs().mean(dims, keepdim=True) / w.abs().mean(dims, keepdim=True)
    return (w - w.sign() * t) * mask * (1.01 / (kept + 0.01) if rescale else 1.0)


# ---- effective weights


def test_effective_weights_on_literal_numbers():
    values = [[[4.0, -2.0, 1.0, 1.0], [3.0, 3.0, 3.0, -3.0]]]
    model, sparsifier = cut_layers(ST3, values, zeros=2)
    # The threshold is 1, the largest removed magnitude. The first filter keeps 6 of 8: its factor is 1.01 / 0.76. The second
    # keeps everything.
    factor = 1.01 / 0.76
    assert model[0].weight.tolist() == [
        pytest.approx([3 * factor, -1 * factor, 0.0, 0.0]),
        pytest.approx([2.0, 2.0, 2.0, -2.0]),
    ]
    assert sparsifier.weights.latent[0].tolist() == values[0]
    plain, _ = cut_layers(ST3, values, zeros=2, rescale=False)
    assert plain[0].weight.tolist() == [[3.0, -1.0, 0.0, 0.0], [2.0, 2.0, 2.0, -2.0]]


def test_effective_weights_follow_the_published_formula():
    torch.manual_seed(0)
    values = [torch.randn(20, 30, dtype=torch.float64), 0.5 * torch.randn(10, 20, dtype=torch.float64)]
    model, sparsifier = cut_layers(ST3, values, zeros=600)
    threshold = torch.cat([v.abs().flatten() for v in values]).sort().values[600 - 1]
    for layer, v in zip(model, values):
        assert torch.allclose(layer.weight, published(v, threshold, v.abs() > threshold), rtol=1e-10, atol=1e-14)
    assert sparsifier.sparsity == 0.75


def test_rescaling_works_on_filters_of_a_convolution():
    torch.manual_seed(0)
    model = nn.Conv2d(4, 6, 3, bias=False).double()
    w = model.weight.detach().clone()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    optg.sparsify(model, optimizer, ST3(schedule="constant"), sparsity=0.5, epochs=1, steps_per_epoch=9)
    t = w.abs().flatten().sort().values[w.numel() // 2 - 1]
    assert torch.allclose(model.weight, published(w, t, w.abs() > t), rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize(
    ("model", "filters"), [(nn.ConvTranspose2d(4, 6, 3, bias=False), (1,)), (Conv1D(6, 4), (1,)), (Experts(3, 4, 5), (0, 1))]
)
def test_rescaling_works_on_the_filters_of_input_first_weights_and_experts(model, filters):
    model.double()
    w = model.weight.detach().clone()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    optg.sparsify(model, optimizer, ST3(schedule="constant"), sparsity=0.5, epochs=1, steps_per_epoch=9)
    t = w.abs().flatten().sort().values[w.numel() // 2 - 1]
    assert torch.allclose(model.weight, published(w, t, w.abs() > t, filters=filters), rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("cls", [ST3, ST3Sigma])
def test_at_threshold_0_effective_weights_equal_latent_ones_bit_for_bit(cls, dtype):
    torch.manual_seed(0)
    model = convnet(norm=False).to(dtype)
    first = copy.deepcopy(model.state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    sparsifier = optg.sparsify(model, optimizer, cls(), sparsity=0.9, epochs=1, steps_per_epoch=40)
    for batch in batches(2):  # cuts begin at 1/20 of training, at a sparsity of 0
        step(model, optimizer, tuple(t.to(dtype) if t.is_floating_point() else t for t in batch))
        for layer, latent in enumerate(sparsifier.weights.latent):
            assert torch.equal(sparsifier.method.effective(sparsifier.weights, layer, latent), latent)
        assert all(torch.equal(a, b) for a, b in zip(first.values(), model.state_dict().values()))


def test_effective_weights_are_continuous_at_the_threshold():
    for gap in (1e-3, 1e-6, 1e-9):
        model, _ = cut_layers(ST3, [[[4.0, 1.0 + gap, 1.0, 0.5]]], zeros=2)
        seen = model[0].weight[0]
        assert 0 < seen[1] < 1.3 * gap and seen[2] == 0.0


def test_weights_of_exactly_0_give_no_nan():
    model, sparsifier = cut_layers(
        ST3, [[[0.0, 0.0, 0.0, 0.0], [2.0, 0.0, 1.0, 4.0]]], zeros=6
    )  # a whole filter, and two of the next
    weights = sparsifier.weights
    assert sparsifier.method.effective(weights, 0, weights.latent[0]).isfinite().all()
    # The threshold is 1; the second filter keeps 6 of 7
    assert model[0].weight[0].tolist() == [0.0] * 4
    assert model[0].weight[1].tolist() == pytest.approx([1.01 / (6 / 7 + 0.01), 0.0, 0.0, 3 * 1.01 / (6 / 7 + 0.01)])
    model, _ = cut_layers(ST3, [[[0.0, 0.0], [0.0, 1.0]]], zeros=2)  # the threshold is 0, and a kept weight is 0
    assert model[0].weight.tolist() == [[0.0, 0.0], [0.0, 1.0]]
    torch.manual_seed(0)
    trained = convnet()
    nn.init.zeros_(trained[7].weight)
    optimizer = torch.optim.SGD(trained.parameters(), **SGD)
    optg.sparsify(trained, optimizer, ST3(schedule="constant"), sparsity=0.5, epochs=1, steps_per_epoch=4)
    for batch in batches(4):
        assert math.isfinite(step(trained, optimizer, batch))
    assert all(v.isfinite().all() for v in trained.state_dict().values())


# ---- ST-3σ


def test_sigma_ranks_by_magnitude_times_the_root_of_the_sum_of_dimensions():
    first = torch.full((4, 5), 10.0)  # √(4 + 5) = 3
    first[0, 0], first[2, 3] = 0.5, 0.9  # ranked as 1.5 and 2.7
    second = [[1.0, 2.0], [3.0, 4.0]]  # √(2 + 2) = 2: ranked as 2, 4, 6, 8
    model, sparsifier = cut_layers(ST3Sigma, [first, second], zeros=2, rescale=False)
    # 1.5 and 2 go, so the thresholds are 2/3 and 2/2
    assert [t.item() for t in sparsifier.method.state["thresholds"]] == pytest.approx([2 / 3, 1.0])
    assert model[1].weight.tolist() == [[0.0, 1.0], [2.0, 3.0]]
    assert model[0].weight[0, 0] == 0.0
    assert model[0].weight[2, 3].item() == pytest.approx(0.9 - 2 / 3) and model[0].weight[1, 1].item() == pytest.approx(
        10 - 2 / 3
    )
    plain, sparsifier = cut_layers(ST3, [first, second], zeros=2, rescale=False)
    # by magnitude alone, 0.5 and 0.9 go, with one common threshold
    assert [t.item() for t in sparsifier.method.state["thresholds"]] == pytest.approx([0.9, 0.9])
    assert plain[1].weight[0, 0].item() == pytest.approx(0.1) and plain[0].weight[2, 3] == 0.0


# ---- training


class Threshold(torch.autograd.Function):
    """The published formula; in backward the gradient passes straight through, times θ for removed weights."""

    @staticmethod
    def forward(ctx, w, mask, t, theta):
        ctx.share = torch.ones_like(w).where(mask, theta)
        return published(w, t, mask)

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.share, None, None, None


@pytest.mark.parametrize("cls, theta", [(ST3, 1.0), (ST3, 0.3), (ST3Sigma, 1.0)])
def test_training_equals_autograd_with_a_straight_through_threshold(cls, theta):
    torch.manual_seed(0)
    reference = convnet(norm=False).double()  # a norm would amplify rounding errors of filters near 0
    for layer, scale in ((0, 0.8), (4, 0.4), (7, 0.15)):
        nn.init.normal_(reference[layer].weight, std=scale)  # so that no layer loses everything
    model = copy.deepcopy(reference)
    optimizer = torch.optim.SGD(model.parameters(), **SGD)
    sparsifier = optg.sparsify(model, optimizer, cls(theta=theta), sparsity=0.9, epochs=4, steps_per_epoch=5)

    latent = {n: p.detach().clone().requires_grad_() for n, p in reference.named_parameters()}
    dims = {"0.weight": 8 + 1 + 3 + 3, "4.weight": 8 + 8 + 3 + 3, "7.weight": 10 + 128}
    scales = {n: math.sqrt(d) if cls is ST3Sigma else 1.0 for n, d in dims.items()}
    masks = {n: torch.ones_like(latent[n], dtype=torch.bool) for n in dims}
    thresholds = dict.fromkeys(dims, torch.tensor(0.0))
    plain = torch.optim.SGD(latent.values(), **SGD)

    def seen():
        cut = {n: Threshold.apply(latent[n], masks[n], t, theta) for n, t in thresholds.items() if t > 0}
        return {**latent, **cut}

    revived = 0
    for i, (x, y) in enumerate(batches(TOTAL, dtype=torch.float64), 1):
        step(model, optimizer, (x, y))
        plain.zero_grad()
        nn.functional.cross_entropy(torch.func.functional_call(reference, seen(), x), y).backward()
        plain.step()
        sparsity = 0.9 * (1 - (1 - min(max((i - 1) / (10 - 1), 0), 1)) ** 3)  # from step 1 of 20 to step 10
        zeros = math.ceil(sparsity * 1928)
        if zeros:
            scores = {n: latent[n].detach().abs() * scale for n, scale in scales.items()}
            last = torch.cat([s.flatten() for s in scores.values()]).sort().values[zeros - 1]
            before, masks = masks, {n: s > last for n, s in scores.items()}
            thresholds = {n: last / scale for n, scale in scales.items()}
            revived += sum(int((masks[n] & ~before[n]).sum()) for n in masks)
        now = dict(zip(masks, sparsifier.weights.latent))
        for n, p in model.named_parameters():
            assert torch.allclose(now.get(n, p), latent[n], rtol=0, atol=1e-10)
            assert torch.allclose(p, seen()[n], rtol=0, atol=1e-9)
        assert all(torch.equal(sparsifier.masks[n], masks[n]) for n in masks)
    assert revived > 20


def test_theta_stays_1_above_95_percent():
    for sparsity in (0.9, 0.99):
        model = convnet()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        sparsifier = optg.sparsify(model, optimizer, "st3", sparsity=sparsity, epochs=2, steps_per_epoch=4)
        assert sparsifier.method.dormant_gradient == 1.0
