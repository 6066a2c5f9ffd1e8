"""phoenix: known answers, training against plain autograd, and steps that reopen dormant weights."""

import copy
import math

import pytest
import torch
from torch import nn

import optg
from optg.methods import Feather, Phoenix
from tests.toy import batches, convnet, entropy, mlp, step

LR, MOMENTUM, DECAY, TOTAL = 0.1, 0.9, 1e-2, 40
SGD = {"lr": LR, "momentum": MOMENTUM, "weight_decay": DECAY}


def start(method, sparsity=0.9, total=TOTAL, model=None, optimizer=None):
    torch.manual_seed(0)
    model = model or convnet()
    optimizer = (optimizer or (lambda p: torch.optim.SGD(p, **SGD)))(model.parameters())
    return model, optimizer, optg.sparsify(model, optimizer, method, sparsity=sparsity, steps=total)


# ---- the rule


def test_its_defaults_are_those_of_the_page():
    method = Phoenix()
    assert (method.start, method.end, method.every, method.schedule, method.budget) == (0.06, 0.7, 16, "cubic", "global")
    assert (method.power, method.theta, method.ham, method.reopen) == (3.0, None, 50.0, 0.0)


def test_cuts_come_every_16_steps_along_a_cubic_ramp():
    """Of 1,000 steps, cuts begin at step 64 = 16·4, the first after 60; the target is reached at 688 = 16·43."""
    _, _, sparsifier = start(Phoenix(), 0.9, total=1000, model=mlp())
    method, clock, weights = sparsifier.method, sparsifier.clock, sparsifier.weights
    due = [s for s in range(1, 1001) if method.due(clock.at(s))]
    assert due[:2] == [64, 80] and due[-2:] == [992, 1000] and len(due) == 60
    for s in (64, 320, 512, 672):
        share = (s / 1000 - 0.06) / 0.64
        assert method.sparsity(weights, clock.at(s)) == pytest.approx(0.9 * (1 - (1 - share) ** 3))
    assert method.sparsity(weights, clock.at(687)) < 0.9 == method.sparsity(weights, clock.at(688))


def test_forward_sees_the_cubic_threshold_of_the_global_cut():
    """|w| = 1 … 8 in two layers, half removed: t = 4, and 5 becomes (125 − 64)^⅓ = 3.936497."""
    layers = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)).double()
    layers[0].weight.data = torch.tensor([[1.0, -5.0], [3.0, 7.0]]).double()
    layers[1].weight.data = torch.tensor([[-2.0, 4.0], [6.0, -8.0]]).double()
    start(Phoenix(schedule="constant"), 0.5, model=layers)
    expected = [0.0, -3.936497, 0.0, 6.534335], [0.0, 0.0, 5.336803, -7.651725]
    for layer, row in zip(layers, expected):
        assert layer.weight.flatten().tolist() == pytest.approx(row, abs=1e-6)


@pytest.mark.parametrize("sparsity, share", [(0.9, 1.0), (0.95, 1.0), (0.98, 0.5)])
def test_theta_is_one_half_above_95_percent(sparsity, share):
    assert start(Phoenix(), sparsity)[2].method.dormant_gradient == share


@pytest.mark.parametrize("ham", [0.0, 50.0])
def test_without_resting_it_is_feather_with_another_ramp_and_ham(ham):
    finals = []
    for method in (Phoenix(ham=ham, every=2, rest_dead=False), Feather(ham=ham, start=0.06, end=0.7, every=2)):
        model, optimizer, _ = start(method)
        for batch in batches(TOTAL):
            step(model, optimizer, batch)
        finals.append(model.state_dict())
    assert all(torch.equal(a, b) for a, b in zip(finals[0].values(), finals[1].values()))


class Threshold(torch.autograd.Function):
    """w · (1 − (t/|w|)³)^⅓ of kept weights; the gradient passes straight through, times θ for removed ones."""

    @staticmethod
    def forward(ctx, w, mask, t, theta):
        ctx.share = torch.ones_like(w).where(mask, torch.tensor(theta, dtype=w.dtype))
        return torch.where(mask, w * (1 - (t / w.abs()).clamp(max=1) ** 3) ** (1 / 3), 0.0)

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.share, None, None, None


@pytest.mark.parametrize("sparsity, theta, rest", [(0.97, 0.5, False), (0.9, 1.0, False), (0.97, 0.5, True)])
def test_training_equals_plain_autograd(sparsity, theta, rest):
    torch.manual_seed(0)
    reference = convnet(norm=False).double()
    for layer in (0, 4, 7):
        nn.init.normal_(reference[layer].weight, std=0.2)  # so that no layer loses everything
    model = copy.deepcopy(reference)
    every, alpha = 2, 30.0
    _, optimizer, sparsifier = start(Phoenix(every=every, ham=alpha, rest_dead=rest), sparsity, model=model)
    latent = {n: p.detach().clone().requires_grad_() for n, p in reference.named_parameters()}
    pruned = list(sparsifier.masks)
    masks, t = {n: torch.ones_like(latent[n], dtype=torch.bool) for n in pruned}, torch.tensor(0.0).double()
    momenta, revived, turned, resting = {n: torch.zeros_like(w) for n, w in latent.items()}, 0, 0, 0
    signs = {n: latent[n].detach().sign() for n in pruned}  # with which each weight was last kept
    last = round(0.7 * TOTAL)
    for i, (x, y) in enumerate(batches(TOTAL, dtype=torch.float64), 1):
        seen = {n: Threshold.apply(w, masks[n], t, theta) if n in masks and t > 0 else w for n, w in latent.items()}
        loss = nn.functional.cross_entropy(torch.func.functional_call(reference, seen, x), y)
        grads = torch.autograd.grad(loss, list(latent.values()))
        with torch.no_grad():
            for (n, w), g in zip(latent.items(), grads):
                if rest and n in masks:
                    dead = ~masks[n].flatten(1).any(1)
                    g[dead] = 0.0
                    resting += int(dead.sum())
                momenta[n] = MOMENTUM * momenta[n] + g + DECAY * w
                factor = torch.exp(-LR * (alpha * w.sign() * g).clamp(-2, 2)) if n in masks else 1.0
                w.copy_((w - LR * momenta[n]) * factor)
        step(model, optimizer, (x, y))
        if (i % every == 0 and i >= 0.06 * TOTAL) or i == TOTAL:
            magnitudes = torch.cat([latent[n].detach().abs().flatten() for n in pruned]).sort().values
            progress = min((i / TOTAL - 0.06) / 0.64, 1.0)
            wanted = sparsity if i >= last else sparsity * (1 - (1 - progress) ** 3)
            t = magnitudes[math.ceil(wanted * len(magnitudes)) - 1]
            before, masks = masks, {n: latent[n].detach().abs() > t for n in pruned}
            for n in pruned:
                back = masks[n] & ~before[n]
                revived += int(back.sum())
                turned += int((back & (latent[n].detach().sign() != signs[n])).sum())
                signs[n] = torch.where(masks[n], latent[n].detach().sign(), signs[n])
        assert all(torch.equal(sparsifier.masks[n], masks[n]) for n in pruned)
        now = dict(zip(pruned, sparsifier.weights.latent))
        for n, p in model.named_parameters():
            torch.testing.assert_close(now.get(n, p), latent[n].detach(), rtol=1e-9, atol=1e-11)
    assert revived > 5 and turned > 0  # weights came back, some with the other sign
    assert (resting > 0) == rest


# ---- resting


@pytest.mark.parametrize("rest", [False, True])
def test_a_dead_neuron_behind_a_batch_norm_has_a_huge_gradient_and_rests(rest):
    """Filter 0 has the smallest weights and loses all; its gradient is larger than that of others by about 1/√ε."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 6), nn.BatchNorm1d(6), nn.Linear(6, 2))
    model[0].weight.data[0] *= 1e-3
    _, optimizer, sparsifier = start(Phoenix(schedule="constant", ham=0.0, rest_dead=rest), 0.5, model=model)
    assert not sparsifier.masks["0.weight"][0].any()
    before = sparsifier.weights.latent[0].clone()
    model(torch.randn(64, 8)).square().mean().backward()
    sizes = model[0].weight.grad.norm(dim=1)
    assert sizes[0] > 50 * sizes[1:].max()
    optimizer.step()
    moved = (sparsifier.weights.latent[0] - before * (1 - LR * DECAY)).norm(dim=1)
    assert moved[1:].min() > 0 and (moved[0] < 1e-9 if rest else moved[0] > moved[1:].max())


# ---- reopening


def test_reopened_steps_are_a_function_of_seed_and_step():
    _, _, sparsifier = start(Phoenix(reopen=0.3), total=1000)
    method, clock = sparsifier.method, sparsifier.clock
    sparsifier.method.thresholds.fill_(1.0)

    def factors(method):
        found = [method.trial_threshold(clock.at(s)) for s in range(1000)]
        return [None if f is None else float(f.thresholds[0]) for f in found]

    chosen = [s for s, f in enumerate(factors(method)) if f is not None]
    assert 200 < len(chosen) < 280 and chosen[-1] < 800  # 30 % of the first 800 steps
    drawn = torch.tensor([f for f in factors(method) if f is not None])
    assert 0 <= drawn.min() < 0.1 < 0.9 < drawn.max() < 1 and drawn.mean().item() == pytest.approx(0.5, abs=0.06)
    other = copy.copy(method)
    other.seed = 1
    assert factors(method) == factors(method) != factors(other)


class Watched(nn.Module):
    """A convnet that records the weights its forward sees."""

    def __init__(self):
        super().__init__()
        self.net, self.seen = convnet(), []

    def forward(self, x):
        self.seen.append([m.weight.detach().clone() for m in self.net if isinstance(m, (nn.Conv2d, nn.Linear))])
        return self.net(x)


def test_forward_of_a_reopened_step_sees_dormant_weights_above_the_lower_threshold():
    model, optimizer, sparsifier = start(Phoenix(reopen=0.5, every=2, start=0.0), 0.8, model=Watched())
    trials = 0
    for batch in batches(TOTAL):
        soft = sparsifier.method.trial_threshold(sparsifier.clock)
        latent, masks = [w.clone() for w in sparsifier.weights.latent], [m.clone() for m in sparsifier.weights.masks]
        norm, before = model.net[1], copy.deepcopy(model.net[1].state_dict())
        optimizer.zero_grad()
        entropy(model, batch).backward()
        for layer, (value, w, mask) in enumerate(zip(model.seen[-1], latent, masks)):
            if soft is None:
                assert not value[~mask].any()
                continue
            t = soft.thresholds[layer]
            shown = w.sign() * (w.abs().double() ** 3 - t.double() ** 3).clamp(min=0) ** (1 / 3)
            torch.testing.assert_close(value.double(), shown, rtol=1e-3, atol=1e-5)
            trials += int((value != 0)[~mask].sum())
        optimizer.step()
        statistics = [name for name, value in norm.named_buffers() if not torch.equal(value, before[name])]
        assert statistics == ([] if soft else ["running_mean", "running_var", "num_batches_tracked"])
        for value, mask in zip(sparsifier.weights.values, sparsifier.weights.masks):
            assert not value[~mask].any()
    assert trials > 100


def test_a_trial_of_several_forward_passes_forgets_the_statistics_of_all():
    model, optimizer, sparsifier = start(Phoenix(reopen=0.99, schedule="constant"), 0.8)
    assert sparsifier.method.trial_threshold(sparsifier.clock)
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    for batch in batches(2):  # two parts of one accumulated gradient
        entropy(model, batch).backward()
    optimizer.step()
    assert before and all(torch.equal(buffer, before[name]) for name, buffer in model.named_buffers())


def test_evaluation_after_a_trial_without_a_step_is_sparse():
    model, _, sparsifier = start(Phoenix(reopen=0.99, schedule="constant"), 0.8, model=Watched())
    x = batches(1)[0][0]
    assert sparsifier.method.trial_threshold(sparsifier.clock)
    model(x)
    assert any(v[~m].any() for v, m in zip(sparsifier.weights.values, sparsifier.weights.masks))
    model.eval()(x)
    assert not any(v[~m].any() for v, m in zip(model.seen[-1], sparsifier.weights.masks))
    model.train()(x)
    saved = sparsifier.state_dict()
    assert saved and not any(v[~m].any() for v, m in zip(sparsifier.weights.values, sparsifier.weights.masks))


def test_reopening_resumes_bit_for_bit():
    data = batches(TOTAL)
    model, optimizer, sparsifier = parts = start(Phoenix(reopen=0.4, every=2))
    for batch in data[:17]:
        step(model, optimizer, batch)
    saved = copy.deepcopy([part.state_dict() for part in parts])
    for batch in data[17:]:
        step(model, optimizer, batch)
    expected = [t.clone() for t in [*model.state_dict().values(), *sparsifier.weights.latent]]
    model, optimizer, sparsifier = parts = start(Phoenix(reopen=0.4, every=2))
    for part, state in zip(parts, saved):
        part.load_state_dict(state)
    for batch in data[17:]:
        step(model, optimizer, batch)
    assert all(map(torch.equal, expected, [*model.state_dict().values(), *sparsifier.weights.latent]))


def test_a_graph_replays_only_usual_steps_and_finish_removes_the_hooks():
    model, _, sparsifier = start(Phoenix(reopen=0.5))
    trials = [sparsifier.method.trial_threshold(sparsifier.clock.at(s)) is not None for s in range(TOTAL)]
    assert [not sparsifier.method.capturable(sparsifier.clock.at(s)) for s in range(TOTAL)] == trials
    assert any(trials) and not all(trials)
    assert model._forward_pre_hooks
    sparsifier.detach()
    assert not model._forward_pre_hooks


def test_without_reopening_the_model_has_no_hooks():
    model, *_ = start(Phoenix())
    assert not model._forward_pre_hooks


def test_bad_options_are_refused():
    with pytest.raises(ValueError, match=r"reopen is 1\.0; expected"):
        Phoenix(reopen=1.0)
