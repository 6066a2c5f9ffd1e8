"""HAM, SparseOpt and shares of dormant weights against plain autograd, and with the options of optimizers."""

import copy
import math

import pytest
import torch
from torch import nn

import optg
from optg.methods import DPF, Dense, Feather, OptG
from tests.toy import batches, convnet, entropy, mlp, step

EPOCHS, STEPS = 4, 5
RATES = {"0.weight": 0.2, "4.weight": 0.05, "7.weight": 0.1}  # of three parameter groups; other parameters: 0.1
DECAY = 1e-2


class Scaled(torch.autograd.Function):
    """Return the weight times its mask; in backward give kept weights their gradient and dormant ones a share of it."""

    @staticmethod
    def forward(ctx, w, mask, share):
        ctx.share = torch.where(mask, 1.0, share)
        return w * mask

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.share, None, None


def neuron_factors(mask):
    """Return SparseOpt's factors of an output-first weight, one neuron at a time."""
    sparsity = [1 - float(neuron.double().mean()) for neuron in mask]
    mean = sum(sparsity) / len(sparsity)
    factors = [1.0 if s == 1 else math.sqrt(1 - s) / math.sqrt(1 - mean) for s in sparsity]
    return torch.tensor(factors, dtype=torch.float64).view(-1, *[1] * (mask.ndim - 1))


def sgd_oracle(w, g, state, lr, alpha):
    state["m"] = 0.9 * state.get("m", 0.0) + g + DECAY * w
    moved = w - lr * state["m"]
    return moved * torch.exp(-lr * (alpha * w.sign() * g).clamp(-2, 2))


def adam_oracle(w, g, state, lr, alpha, factor, decoupled):
    """Adam's step times `factor`, without decoupled weight decay; then HAM by that step."""
    g, rest = (g, (1 - lr * DECAY) * w) if decoupled else (g + DECAY * w, w)
    t = state["t"] = state.get("t", 0) + 1
    state["m"] = 0.9 * state.get("m", 0.0) + 0.1 * g
    state["v"] = 0.999 * state.get("v", 0.0) + 0.001 * g**2
    move = -lr * factor * (state["m"] / (1 - 0.9**t)) / ((state["v"] / (1 - 0.999**t)).sqrt() + 1e-8)
    return (rest + move) * torch.exp((alpha / 10 * w.sign() * move).clamp(-0.2, 0.2))


def groups_of(model):
    return [{"params": [p], "lr": RATES.get(name, 0.1)} for name, p in model.named_parameters()]


OPTIMIZERS = {
    "sgd": lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9, weight_decay=DECAY),
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=0.1, weight_decay=DECAY),
}
METHODS = {
    "dense": (Dense, 0.0, 1.0),
    "dpf": (lambda **o: DPF(every=2, **o), 0.9, 1.0),  # method, sparsity, share of dormant weights
    "optg": (OptG, 0.9, 0.0),
    "feather": (lambda **o: Feather(every=2, power=math.inf, theta=0.3, **o), 0.9, 0.3),
}


@pytest.mark.parametrize("ham, sparse_opt", [(0.0, False), (30.0, False), (0.0, True), (30.0, True)])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("kind", [*OPTIMIZERS, "adam"])
def test_training_equals_plain_autograd(kind, method, ham, sparse_opt):
    make, sparsity, share = METHODS[method]
    torch.manual_seed(0)
    reference = convnet(norm=False).double()
    model = copy.deepcopy(reference)
    coupled = torch.optim.Adam(groups_of(model), lr=0.1, weight_decay=DECAY)
    optimizer = coupled if kind == "adam" else OPTIMIZERS[kind](groups_of(model))
    sparsifier = optg.sparsify(
        model, optimizer, make(ham=ham, sparse_opt=sparse_opt), sparsity=sparsity, epochs=EPOCHS, steps_per_epoch=STEPS
    )
    latent = {n: p.detach().clone().requires_grad_() for n, p in reference.named_parameters()}
    states = {n: {} for n in latent}
    for x, y in batches(EPOCHS * STEPS, dtype=torch.float64):
        masks = {n: m.clone() for n, m in sparsifier.masks.items()}
        seen = {n: Scaled.apply(w, masks[n], 1.0) if n in masks else w for n, w in latent.items()}
        loss = nn.functional.cross_entropy(torch.func.functional_call(reference, seen, x), y)
        for (n, w), g in zip(latent.items(), torch.autograd.grad(loss, list(latent.values()))):
            lr, pruned = RATES.get(n, 0.1), n in masks
            dormant = torch.full_like(g, share).masked_fill(masks[n], 1.0) if pruned else torch.ones_like(g)
            neurons = neuron_factors(masks[n]) if pruned and sparse_opt else 1.0
            alpha = ham if pruned else 0.0
            with torch.no_grad():
                if kind == "sgd":
                    w.copy_(sgd_oracle(w, g * dormant * neurons, states[n], lr, alpha))
                elif share == 0:  # removed weights get no gradient; what is left of their momentum moves them in full
                    factor = torch.where(dormant == 0, 1.0, dormant * neurons)
                    alpha = alpha * dormant
                    w.copy_(adam_oracle(w, g * dormant, states[n], lr, alpha, factor, kind == "adamw"))
                else:
                    w.copy_(adam_oracle(w, g, states[n], lr, alpha, dormant * neurons, kind == "adamw"))
        step(model, optimizer, (x, y))
        now = dict(zip(masks, sparsifier.weights.latent or sparsifier.weights.values))
        for n, p in model.named_parameters():
            torch.testing.assert_close(now.get(n, p), latent[n].detach(), rtol=1e-6, atol=1e-9)
    assert sparsifier.sparsity >= sparsity


def test_ham_moves_a_weight_by_hand():
    """w = ±0.5, g = 0.4, η = 0.1, α = 2: SGD moves to w − 0.04, HAM multiplies by exp(∓0.1 · 0.8)."""
    layer = nn.Linear(3, 1, bias=False)
    layer.weight.data = torch.tensor([[0.5, -0.5, 0.0]])
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    optg.sparsify(layer, optimizer, Dense(ham=2.0), sparsity=0.0, steps=2)
    layer.weight.grad = torch.full((1, 3), 0.4)
    optimizer.step()
    assert layer.weight[0].tolist() == pytest.approx([0.46 * math.exp(-0.08), -0.54 * math.exp(0.08), -0.04])
    layer.weight.data = torch.tensor([[0.5, -0.5, 0.01]])
    layer.weight.grad = torch.tensor([[100.0, -100.0, 0.2]])  # the clamp holds; the sign is that of before the step
    optimizer.step()
    assert layer.weight[0].tolist() == pytest.approx([-9.5 * math.exp(-0.2), 9.5 * math.exp(-0.2), -0.01 * math.exp(-0.04)])


@pytest.mark.parametrize("size", [0.2, 0.02])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_ham_adds_the_same_share_of_the_movement_under_any_optimizer(optimizer, size):
    """A weight moves by α·|w| / 10 more than it would without HAM, under SGD with momentum 0.9 and under AdamW."""

    def movement(alpha):
        layer = nn.Linear(1, 1, bias=False).double()
        layer.weight.data.fill_(size)
        made = {
            "sgd": torch.optim.SGD(layer.parameters(), lr=1e-6, momentum=0.9),
            "adamw": torch.optim.AdamW(layer.parameters(), lr=1e-7, weight_decay=0.0),
        }[optimizer]
        optg.sparsify(layer, made, Dense(ham=alpha), sparsity=0.0, steps=1000)
        for _ in range(1000):
            layer.weight.grad = torch.full((1, 1), -0.01, dtype=torch.float64)
            made.step()
        return layer.weight.item() - size

    share = movement(50.0) / movement(0.0) - 1
    assert share == pytest.approx(50 * size / 10, rel=0.02)


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("options", [{"ham": 50.0}, {"sparse_opt": True}, {"theta": 0.3}], ids=lambda o: next(iter(o)))
def test_each_option_acts_under_each_optimizer(kind, options):
    """A factor on the gradient would cancel under AdamW."""

    def dormant_movement(**options):
        torch.manual_seed(0)
        model = convnet()
        optimizer = OPTIMIZERS[kind](model.parameters())
        method = Feather(schedule="constant", budget="uniform", **{"theta": 1.0} | options)
        sparsifier = optg.sparsify(model, optimizer, method, sparsity=0.9, steps=20)
        before = [w.clone() for w in sparsifier.weights.latent]
        step(model, optimizer, batches(1)[0])
        moved = [(a - b)[~m] for a, b, m in zip(sparsifier.weights.latent, before, sparsifier.weights.masks)]
        return torch.cat(moved)

    plain, changed = dormant_movement(), dormant_movement(**options)
    assert (changed - plain).norm() > 0.05 * plain.norm()
    if "theta" in options:
        assert changed.norm() == pytest.approx(0.3 * float(plain.norm()), rel=0.05)  # decay is whole


def test_no_option_changes_nothing(monkeypatch):
    """Without them, no step asks what kind of optimizer it has or copies a weight."""
    monkeypatch.setattr("optg.core.parameters.find_rule", lambda *_: pytest.fail("it was asked"))
    for method in ("optg", "dense", "dpf", Feather(theta=1.0)):
        model = mlp()
        optimizer = torch.optim.AdamW(model.parameters())
        sparsifier = optg.sparsify(model, optimizer, method, sparsity=0.0 if method == "dense" else 0.5, steps=5)
        assert sparsifier._step.updates is None
        step(model, optimizer, batches(1)[0])


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_a_grad_scaler_only_skips_steps(kind, fused):
    def start():
        torch.manual_seed(0)
        model = convnet(norm=False)
        optimizer = kind(model.parameters(), lr=0.01, fused=fused)
        method = Feather(every=2, theta=0.5, ham=50.0, sparse_opt=True)
        return model, optimizer, optg.sparsify(model, optimizer, method, sparsity=0.9, epochs=EPOCHS, steps_per_epoch=STEPS)

    model, optimizer, sparsifier = start()
    plain, plain_optimizer, plain_sparsifier = start()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for i, batch in enumerate(batches(EPOCHS * STEPS)):
        optimizer.zero_grad()
        scaler.scale(entropy(model, batch) * (torch.inf if i == 7 else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
        if i == 7:
            plain_sparsifier.advance()
            if not fused:
                sparsifier.advance()
        else:
            step(plain, plain_optimizer, batch)
    for a, b in zip(sparsifier.weights.latent, plain_sparsifier.weights.latent):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def test_ham_sees_the_clipped_gradient():
    def after(clip, lr):
        torch.manual_seed(0)
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=lr)
        sparsifier = optg.sparsify(model, optimizer, DPF(schedule="constant", ham=10.0), sparsity=0.5, steps=5)
        (entropy(model, batches(1)[0]) * (1.0 if clip else 1e-3)).backward()
        if clip:
            norm = sparsifier.clip_grad_norm_(1e-3)
            for p in model.parameters():
                p.grad *= norm  # now a thousandth of the gradient, like without clipping
        optimizer.step()
        return sparsifier.weights.latent

    for a, b in zip(after(True, 10.0), after(False, 10.0)):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-6)


def test_the_clipping_norm_counts_what_the_optimizer_receives():
    """Under AdamW dormant weights receive the whole gradient: their share is taken of the step instead."""
    norms = {}
    for kind in OPTIMIZERS:
        torch.manual_seed(0)
        model = mlp()
        optimizer = OPTIMIZERS[kind](model.parameters())
        sparsifier = optg.sparsify(model, optimizer, Feather(schedule="constant", theta=0.5), sparsity=0.9, steps=5)
        entropy(model, batches(1)[0]).backward()
        whole = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
        norms[kind] = float(sparsifier.clip_grad_norm_(1e9) / whole)
    assert norms["adamw"] == pytest.approx(1.0) and norms["sgd"] < 0.9


def test_several_optimizers_each_follow_their_own_rule():
    """SGD trains the first layer, AdamW the second: each weight moves as in a run with that optimizer alone."""
    torch.manual_seed(0)
    model = mlp().double()
    single = copy.deepcopy(model)
    method = DPF(schedule="constant", ham=20.0, sparse_opt=True)
    pair = [torch.optim.SGD([model[1].weight], lr=0.3, momentum=0.9), torch.optim.AdamW([model[3].weight], lr=0.01)]
    both = optg.sparsify(model, pair, method, sparsity=0.5, steps=5)
    batch = batches(1, dtype=torch.float64)[0]
    entropy(model, batch).backward()
    for optimizer in pair:
        optimizer.step()
    for layer, kind, options in ((1, torch.optim.SGD, {"lr": 0.3, "momentum": 0.9}), (3, torch.optim.AdamW, {"lr": 0.01})):
        alone = copy.deepcopy(single)
        optimizer = kind(alone.parameters(), **options)
        sparsifier = optg.sparsify(alone, optimizer, method, sparsity=0.5, steps=5)
        entropy(alone, batch).backward()
        optimizer.step()
        index = (layer - 1) // 2
        assert torch.equal(both.weights.latent[index], sparsifier.weights.latent[index])


def test_a_state_saved_before_these_options_existed_is_loaded():
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sparsifier = optg.sparsify(model, optimizer, "optg", sparsity=0.5, steps=5)
    state = sparsifier.state_dict()
    state["options"] = {k: v for k, v in state["options"].items() if k not in ("ham", "sparse_opt")}
    sparsifier.load_state_dict(state)
    sparsifier.finish()
    other = optg.sparsify(model, optimizer, OptG(ham=50.0), sparsity=0.5, steps=5)
    with pytest.raises(ValueError, match="ham"):
        other.load_state_dict(state)


def test_invalid_options_are_refused():
    with pytest.raises(ValueError, match=r"ham is -1\.0; expected"):
        Dense(ham=-1.0)
    model = mlp()
    with pytest.raises(ValueError, match="maximize=True"):
        optg.sparsify(model, torch.optim.SGD(model.parameters(), lr=0.1, maximize=True), DPF(ham=5.0), sparsity=0.5, steps=2)
