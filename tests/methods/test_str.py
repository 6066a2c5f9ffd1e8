"""STR against plain autograd."""

import copy

import pytest
import torch
from torch import nn

import optg
from optg.methods import STR
from tests.toy import batches, convnet, step

SGD = {"lr": 0.05, "momentum": 0.9, "weight_decay": 1e-2}


@pytest.mark.parametrize("decay", [None, 0.05])
def test_weights_thresholds_and_masks_equal_those_of_autograd(decay):
    torch.manual_seed(0)
    reference = convnet().double()
    model = copy.deepcopy(reference)
    optimizer = torch.optim.SGD(model.parameters(), **SGD)
    sparsifier = optg.sparsify(model, optimizer, STR(initial=-3.0, decay=decay), sparsity=0.9, epochs=3, steps_per_epoch=5)

    latent = {n: p.detach().clone().requires_grad_() for n, p in reference.named_parameters()}
    s = {n: torch.tensor(-3.0, dtype=torch.float64, requires_grad=True) for n in sparsifier.masks}
    groups = [{"params": latent.values()}, {"params": s.values(), "weight_decay": 1e-2 if decay is None else decay}]
    plain = torch.optim.SGD(groups, **SGD)

    def seen():
        shrunk = {n: latent[n].sign() * (latent[n].abs() - s[n].sigmoid()).relu() for n in s}
        return {**latent, **shrunk}

    flips = 0
    for x, y in batches(15, dtype=torch.float64):
        before = {n: m.clone() for n, m in sparsifier.masks.items()}
        step(model, optimizer, (x, y))
        plain.zero_grad()
        nn.functional.cross_entropy(torch.func.functional_call(reference, seen(), x), y).backward()
        plain.step()
        now, thresholds = (dict(zip(s, tensors)) for tensors in (sparsifier.weights.latent, sparsifier.method.state["s"]))
        for n, p in model.named_parameters():
            assert torch.allclose(p, seen()[n], rtol=0, atol=1e-12)
            assert torch.allclose(now.get(n, p), latent[n], rtol=0, atol=1e-12)
        for n, mask in sparsifier.masks.items():
            assert thresholds[n].item() == pytest.approx(s[n].item(), abs=1e-12)
            assert torch.equal(mask, seen()[n] != 0)
            flips += int((mask != before[n]).sum())
    assert flips > 100  # the masks do change
    assert all(abs(value + 3) > 0.01 for value in s.values())  # and so do the thresholds


def test_the_gradient_of_a_threshold_on_literal_numbers():
    model = nn.Linear(4, 1, bias=False).double()
    model.weight.data.copy_(torch.tensor([[1.0, -2.0, 0.4, 3.0]]))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    sparsifier = optg.sparsify(model, optimizer, STR(initial=0.0), sparsity=0.5, epochs=1, steps_per_epoch=5)
    assert model.weight.tolist() == [[0.5, -1.5, 0.0, 2.5]]  # |w| − σ(0) = |w| − 1/2
    optimizer.param_groups[0]["lr"] = 0.1
    model(torch.tensor([1.0, 3.0, 100.0, 6.0]).double()).backward()
    optimizer.step()
    # dL/ds = −σ'(0) · Σ g · sign(w) over kept weights = −1/4 · (1 − 3 + 6) = −1, so s = 0.1
    assert sparsifier.method.state["s"][0].item() == pytest.approx(0.1)
    # kept weights receive their whole gradient (1 − 0.1 = 0.9, −2 − 0.3, 3 − 0.6), the removed one receives none
    assert sparsifier.weights.latent[0].tolist()[0] == pytest.approx([0.9, -2.3, 0.4, 2.4])


@pytest.mark.parametrize("decay, moved", [(None, [-9.5, -9.9]), (1.0, [-9.0, -9.0])])
def test_s_decays_like_its_weights_unless_decay_is_given(decay, moved):
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    groups = [{"params": model[0].parameters(), "weight_decay": 0.5}, {"params": model[1].parameters(), "weight_decay": 0.1}]
    optimizer = torch.optim.SGD(groups, lr=0.1)
    sparsifier = optg.sparsify(model, optimizer, STR(initial=-10.0, decay=decay), sparsity=0.5, epochs=1, steps_per_epoch=5)

    def step_without_gradient():
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
        optimizer.step()
        return [s.item() for s in sparsifier.method.state["s"]]

    assert step_without_gradient() == pytest.approx(moved)  # s − 0.1 · decay · s
    first = [-10 - s for s in moved]  # 0.1 · momentum
    rates = [-0.1 * decay if decay else -0.05, -0.1 * decay if decay else -0.01]
    assert step_without_gradient() == pytest.approx([s - 0.9 * m + r * s for s, m, r in zip(moved, first, rates)])


def test_sparsity_grows_with_decay_and_ignores_the_target():
    def learned(decay, sparsity):
        torch.manual_seed(0)
        model = convnet()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        sparsifier = optg.sparsify(model, optimizer, STR(-5.0, decay), sparsity=sparsity, epochs=4, steps_per_epoch=5)
        for batch in batches(20):
            step(model, optimizer, batch)
        return sparsifier.sparsity

    shares = [learned(decay, 0.9) for decay in (0.0, 0.02, 0.05, 0.1)]
    assert shares == sorted(set(shares)) and shares[0] < 0.2 and shares[-1] > 0.6
    assert [learned(decay, 0.1) for decay in (0.0, 0.02, 0.05, 0.1)] == shares


def test_finish_makes_no_last_cut():
    torch.manual_seed(0)
    model = convnet()
    optimizer = torch.optim.SGD(model.parameters(), **SGD)
    sparsifier = optg.sparsify(model, optimizer, STR(-3.0), sparsity=0.9, epochs=4, steps_per_epoch=5)
    for batch in batches(10):  # half of the announced steps
        step(model, optimizer, batch)
    weights, masks = copy.deepcopy(model.state_dict()), copy.deepcopy(sparsifier.masks)
    assert 0 < sparsifier.sparsity < 0.8
    with pytest.warns(UserWarning, match=r"ended at sparsity .*, not 0\.9: str learns it"):
        sparsifier.finish()
    assert all(torch.equal(a, b) for a, b in zip(weights.values(), model.state_dict().values()))
    assert all(torch.equal(a, b) for a, b in zip(masks.values(), sparsifier.masks.values()))


def test_a_skipped_step_changes_neither_s_nor_its_momentum():
    torch.manual_seed(0)
    model = convnet()
    optimizer = torch.optim.SGD(
        model.parameters(), **SGD, fused=True
    )  # a GradScaler lets fused optimizers skip the step themselves
    sparsifier = optg.sparsify(model, optimizer, STR(-3.0), sparsity=0.9, epochs=1, steps_per_epoch=5)
    scaler = torch.amp.GradScaler("cpu")
    for broken, (x, y) in enumerate(batches(2)):
        before = copy.deepcopy(sparsifier.method.state)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        scaler.scale(loss * torch.inf if broken else loss).backward()
        scaler.step(optimizer)
        scaler.update()
    for kind in ("s", "momenta"):
        assert all(torch.equal(a, b) for a, b in zip(before[kind], sparsifier.method.state[kind])), kind
