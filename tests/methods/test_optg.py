"""OptG against a slow reference, and each of its equations on literal numbers."""

import math
import warnings
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from torch import nn

import optg
from optg.core.clock import Clock
from optg.methods import OptG
from tests.methods import optg_reference
from tests.toy import batches, convnet, step

EPOCHS, STEPS, SPARSITY = 3, 8, 0.8
LR, MOMENTUM, DECAY, ALPHA = 0.05, 0.9, 1e-2, 1.0


def train_ours(method: OptG):
    """Yield (masks, latent weights, scores) after each cut and at the end of an ordinary training loop."""
    torch.manual_seed(0)
    model = convnet()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM, weight_decay=DECAY)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS)
    sparsifier = optg.sparsify(model, optimizer, method, sparsity=SPARSITY, epochs=EPOCHS, steps_per_epoch=STEPS)

    def snapshot():
        weights = sparsifier.weights
        latent = weights.latent or weights.values
        values = [torch.where(m, v, z) for m, v, z in zip(weights.masks, weights.values, latent)]
        columns = (weights.masks, values, sparsifier.method.state["scores"])
        return [{n: t.clone() for n, t in zip(weights.names, column)} for column in columns]

    for i, batch in enumerate(batches(EPOCHS * STEPS)):
        step(model, optimizer, batch)
        if (i + 1) % STEPS == 0:
            schedule.step()
            yield snapshot()


def distance(method: OptG) -> tuple[int, float]:
    """Return how many mask entries differ from the reference, and the largest difference of a latent weight or score."""
    torch.manual_seed(0)
    options = dict(sparsity=SPARSITY, epochs=EPOCHS, alpha=ALPHA, lr=LR, momentum=MOMENTUM, weight_decay=DECAY)
    names = ["0.weight", "4.weight", "7.weight"]
    reference = optg_reference.train(convnet(), batches(EPOCHS * STEPS), names, **options)
    flips, difference = 0, 0.0
    for (masks, weights, scores), (ref_masks, ref_weights, ref_scores) in zip(train_ours(method), reference, strict=True):
        for n in names:
            flips += int((masks[n] != ref_masks[n].bool()).sum())
            difference = max(difference, float((weights[n] - ref_weights[n]).abs().max()))
            difference = max(difference, float((scores[n] - ref_scores[n]).abs().max()))
    return flips, difference


def test_equals_the_reference():
    flips, difference = distance(OptG(alpha=ALPHA))
    assert flips == 0 and difference < 1e-6


@dataclass
class ScoresByEffectiveWeight(OptG):
    def after_backward(self, weights, clock, lr):
        latent = [v.clone() for v in weights.values]
        weights.show_effective()
        super().after_backward(weights, clock, lr)
        torch._foreach_copy_(weights.values, latent)


@dataclass
class LosesDormantValues(OptG):
    keeps_pruned: ClassVar[bool] = False


@pytest.mark.parametrize(
    "variant", [ScoresByEffectiveWeight(alpha=ALPHA), LosesDormantValues(alpha=ALPHA), OptG(alpha=ALPHA, every=1)]
)
def test_the_reference_detects_wrong_variants(variant):
    flips, difference = distance(variant)
    assert flips > 0 and difference > 1e-4


def linear_model(weight: list[float], **options):
    """Return y = w·x with SGD without momentum, so that a step can be computed by hand."""
    model = nn.Linear(len(weight), 1, bias=False).double()
    model.weight.data.copy_(torch.tensor([weight]))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return model, optimizer, optg.sparsify(model, optimizer, OptG(**options), sparsity=0.5, epochs=4, steps_per_epoch=2)


def test_equations_10_and_16_on_literal_numbers():
    model, optimizer, sparsifier = linear_model([1.0, -2.0, 3.0, 4.0], alpha=math.log(3))
    # loss = y, so dL/dw = x. Epoch 1 of 4: 1 / (1 + exp(−ln 3 · (1 − 2))) = 1/4, and η_m = 0.1 / 4 = 0.025.
    model(torch.tensor([1.0, 1.0, -1.0, 0.5]).double()).backward()
    optimizer.step()
    [scores] = sparsifier.method.state["scores"]
    assert scores.tolist()[0] == pytest.approx([-0.025, 0.05, 0.075, -0.05])  # −η_m · x · w
    # Again with momentum 0.9: m = 0.9 · (1, −2, −3, 2) + x · w', w' = w − 0.1 x = (0.9, −2.1, 3.1, 3.95)
    optimizer.zero_grad()
    model(torch.tensor([1.0, 1.0, -1.0, 0.5]).double()).backward()
    optimizer.step()
    m = [0.9 + 0.9, -1.8 - 2.1, -2.7 - 3.1, 1.8 + 1.975]
    expected = [a - 0.025 * b for a, b in zip([-0.025, 0.05, 0.075, -0.05], m)]
    assert scores.tolist()[0] == pytest.approx(expected)
    # Now epoch 2 begins: P_2 = 0.5 / (1 + exp(0)) = 1/4. One of four weights goes: the last, which has the lowest score.
    assert sparsifier.masks["weight"].tolist() == [[True, True, True, False]]
    assert float(sparsifier.method.factor) == pytest.approx(0.5)


def test_equation_5_ranks_all_layers_together():
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 1, bias=False))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sparsifier = optg.sparsify(model, optimizer, "optg", sparsity=0.5, epochs=2, steps_per_epoch=1)
    scores = sparsifier.method.state["scores"]
    scores[0].copy_(torch.tensor([[0.5, -0.1], [0.2, 0.9]]))
    scores[1].copy_(torch.tensor([[0.3, 0.1]]))
    sparsifier.method.cut(sparsifier.weights, 0.5)
    assert [m.tolist() for m in sparsifier.masks.values()] == [[[True, False], [False, True]], [[True, False]]]


@pytest.mark.parametrize("kept", [True, False])
def test_a_score_changes_by_the_effect_of_its_weight_on_the_loss(kept):
    """Eq. 11: to first order, the score of a kept weight changes by η·ΔL, where ΔL is the change of the loss if the weight is
    removed. The score of a removed weight changes by −η·Δ⁺L, where Δ⁺L is the change of the loss if it is added back. Checked
    against differences of the loss, on weights that are small enough for first order."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    for p in model.parameters():
        p.data.mul_(1e-3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sparsifier = optg.sparsify(model, optimizer, OptG(momentum=0.0), sparsity=0.5, epochs=2, steps_per_epoch=50)
    weight, layer = model[0].weight, 0
    sparsifier.weights.masks[layer][0, 0] = kept
    latent = weight[0, 0].item()
    sparsifier.weights.show_effective()
    x, y = torch.randn(20, 6).double(), torch.randint(3, (20,))

    def loss_with(value):
        with torch.no_grad():
            before = weight[0, 0].item()
            weight[0, 0] = value
            loss = nn.functional.cross_entropy(model(x), y).item()
            weight[0, 0] = before
        return loss

    removal = loss_with(0.0) - loss_with(latent)  # ΔL; Δ⁺L is its negative
    nn.functional.cross_entropy(model(x), y).backward()
    rate = 0.1 * float(sparsifier.method.factor)
    optimizer.step()
    moved = sparsifier.method.state["scores"][layer][0, 0].item()
    assert moved == pytest.approx(rate * removal, rel=1e-2) and moved != 0


def test_revived_weights_have_their_old_value():
    model, optimizer, sparsifier = linear_model([1.0, 2.0, 3.0, 4.0], dormant_decay=False)
    weights = sparsifier.weights
    for group in optimizer.param_groups:
        group["weight_decay"] = 0.1
    sparsifier.method.state["scores"][0].copy_(torch.tensor([[0.0, 1.0, 1.0, 1.0]]))
    sparsifier.method.cut(weights, 0.25)
    weights.show_effective()
    model(torch.ones(4).double()).backward()
    optimizer.step()
    assert model.weight[0, 0] == 0.0
    sparsifier.method.state["scores"][0].copy_(torch.tensor([[1.0, 1.0, 1.0, 0.0]]))
    weights.show_latent()
    sparsifier.method.cut(weights, 0.25)
    weights.show_effective()
    assert model.weight[0, 0] == 1.0


def test_dormant_weights_decay_by_default():
    model, optimizer, sparsifier = linear_model([1.0, 2.0, 3.0, 4.0])
    optimizer.param_groups[0]["weight_decay"] = 0.1
    sparsifier.weights.masks[0][0, 0] = False
    sparsifier.weights.show_effective()
    model(torch.ones(4).double()).backward()
    optimizer.step()
    assert sparsifier.weights.latent[0][0, 0] == pytest.approx(1.0 - 0.1 * 0.1)  # lr × decay, no loss gradient


def test_cuts_are_made_at_epoch_starts_and_the_last_reaches_the_target():
    clock, method = Clock(5, 4), OptG()
    cuts = {}
    weights = type("Weights", (), {"target": 0.9})()
    for clock.step in range(21):
        if method.due(clock):
            cuts[clock.step] = method.sparsity(weights, clock)
    assert list(cuts) == [4, 8, 12, 16]
    assert cuts[16] == 0.9
    assert cuts[8] == pytest.approx(0.9 / (1 + math.exp(-8.0 * (3 - 2.5))))


def test_scores_use_the_learning_rate_of_their_parameter_group():
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 1, bias=False))
    with torch.no_grad():
        model[1].weight.fill_(1.0)
        model[0].weight.fill_(1.0)
    optimizer = torch.optim.SGD(
        [{"params": model[0].parameters(), "lr": 0.1}, {"params": model[1].parameters(), "lr": 0.4}], lr=1
    )
    sparsifier = optg.sparsify(model, optimizer, "optg", sparsity=0.5, epochs=2, steps_per_epoch=9)
    model(torch.ones(4)).backward()
    optimizer.step()
    first, second = sparsifier.method.state["scores"]
    # dL/dw is 1 in the first layer and 4 in the second: the steps are 0.1 · 1 and 0.4 · 4
    assert float(second[0, 0] / first[0, 0]) == pytest.approx(16.0)


def test_extra_memory_is_13_bytes_per_weight():
    model = convnet()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sparsifier = optg.sparsify(model, optimizer, "optg", sparsity=0.5, epochs=2, steps_per_epoch=2)
    held = [*sparsifier.weights.masks, *sparsifier.weights.latent, *sum(sparsifier.method.state.values(), [])]
    assert sum(t.untyped_storage().nbytes() for t in held) == sparsifier.weights.size * (
        4 + 4 + 4 + 1
    )  # latent, score, momentum, mask
    assert optimizer.param_groups[0]["params"] == list(model.parameters())  # no second optimizer, no extra group


def test_a_sigmoid_that_is_too_flat_to_reach_the_target_gives_a_warning():
    def sparsify(alpha, **options):
        model = nn.Linear(40, 50)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        optg.sparsify(model, optimizer, OptG(alpha=alpha, **options), sparsity=0.99, epochs=80, steps_per_epoch=2)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sparsify(None), sparsify(0.3)
        # k is 80 at the start of the last epoch: 0.99 / (1 + e^-4) is 97.22 %, and the last cut removes 64 % of the rest
        with pytest.raises(UserWarning, match=r"alpha=0.1 .* only 97.22% before .* removes 64% of the kept weights"):
            sparsify(0.1)
        # k is 41: 0.99 / (1 + e^-0.5) is 61.62 %
        with pytest.raises(UserWarning, match=r"alpha=None and end=0.5 .* only 61.62% before .* removes 97% of the kept"):
            sparsify(None, end=0.5)


def test_a_run_of_one_epoch_is_divided_like_one_whose_length_is_given_in_steps():
    found = []
    for length in ({"epochs": 1, "steps_per_epoch": 12}, {"steps": 12}, {"epochs": 1, "steps": 12}):
        torch.manual_seed(0)
        model = convnet()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        sparsifier = optg.sparsify(model, optimizer, "optg", sparsity=0.9, **length)
        seen = []
        for batch in batches(12):
            step(model, optimizer, batch)
            seen.append(sparsifier.sparsity)
        assert seen == sorted(seen) and 0 < seen[0] < seen[4] < seen[5] < seen[-2] == seen[-1] == 1736 / 1928
        found.append(sparsifier.masks)
    assert all(torch.equal(mask, other[name]) for other in found[1:] for name, mask in found[0].items())


def test_a_run_of_one_step_is_refused():
    model = convnet()
    with pytest.raises(ValueError, match="training has a single step, expected at least 2"):
        optg.sparsify(model, torch.optim.SGD(model.parameters(), lr=0.1), sparsity=0.5, epochs=1, steps_per_epoch=1)


def test_score_lr_is_a_number_or_a_known_name():
    assert OptG(score_lr=1).score_lr == 1.0 and isinstance(OptG(score_lr=1).score_lr, float)
    with pytest.raises(ValueError, match="unknown score_lr 'wieght'; did you mean 'weight'"):
        OptG(score_lr="wieght")
