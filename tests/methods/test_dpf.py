"""DPF against plain autograd."""

import math
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from torch import nn

import optg
from optg.methods import DPF
from tests.toy import batches, convnet, step

TOTAL, EVERY, SPARSITY = 24, 3, 0.9
SGD = {"lr": 0.05, "momentum": 0.9, "weight_decay": 1e-2}
NAMES = ["0.weight", "4.weight", "7.weight"]


def oracle(model):
    """Run DPF in plain autograd. Yield masks and latent weights after each step."""
    latent = {n: p.detach().clone().requires_grad_() for n, p in model.named_parameters()}
    masks = {n: torch.ones_like(latent[n]) for n in NAMES}
    optimizer = torch.optim.SGD(latent.values(), **SGD)
    for t, (x, y) in enumerate(batches(TOTAL, dtype=torch.float64), 1):
        # straight through: the value is w·mask, and its gradient passes to w unchanged
        seen = {n: w + (w * masks[n] - w).detach() if n in masks else w for n, w in latent.items()}
        optimizer.zero_grad()
        nn.functional.cross_entropy(torch.func.functional_call(model, seen, x), y).backward()
        optimizer.step()
        if t % EVERY == 0:
            magnitudes = torch.cat([latent[n].detach().abs().flatten() for n in NAMES])
            sparsity = SPARSITY * (1 - (1 - min(t / (0.75 * TOTAL), 1)) ** 3)  # Zhu & Gupta, over 3/4 of training
            kept = torch.ones_like(magnitudes)
            kept[magnitudes.argsort()[: math.ceil(sparsity * len(magnitudes))]] = 0
            for n, part in zip(NAMES, kept.split([masks[n].numel() for n in NAMES])):
                masks[n] = part.view_as(masks[n])
        yield masks, {n: w.detach() for n, w in latent.items()}


def distance(method: DPF) -> tuple[int, float]:
    """Return how many mask entries differ from the oracle over all steps, and the largest difference of a weight."""
    torch.manual_seed(0)
    reference = convnet().double()
    torch.manual_seed(0)
    model = convnet().double()
    optimizer = torch.optim.SGD(model.parameters(), **SGD)
    sparsifier = optg.sparsify(model, optimizer, method, sparsity=SPARSITY, epochs=4, steps_per_epoch=6)
    flips, difference = 0, 0.0
    for batch, (masks, latent) in zip(batches(TOTAL, dtype=torch.float64), oracle(reference), strict=True):
        step(model, optimizer, batch)
        now = dict(zip(NAMES, sparsifier.weights.latent or sparsifier.weights.values))
        for n, expected in latent.items():
            p = model.state_dict()[n]
            if n in masks:
                flips += int((sparsifier.masks[n] != masks[n].bool()).sum())
                difference = max(difference, float((p - expected * masks[n]).abs().max()))
            difference = max(difference, float((now.get(n, p) - expected).abs().max()))
    return flips, difference


def test_equals_the_oracle():
    flips, difference = distance(DPF(every=EVERY))
    assert flips == 0 and difference < 1e-12


@dataclass
class LosesDormantValues(DPF):
    keeps_pruned: ClassVar[bool] = False


@dataclass
class StopsCutting(DPF):
    keeps_cutting: ClassVar[bool] = False


@dataclass
class NoDormantGradient(DPF):
    @property
    def dormant_gradient(self) -> float:
        return 0.0


@pytest.mark.parametrize(
    "variant", [LosesDormantValues(every=EVERY), StopsCutting(every=EVERY), NoDormantGradient(every=EVERY), DPF(every=2)]
)
def test_the_oracle_detects_wrong_variants(variant):
    flips, _ = distance(variant)
    assert flips > 0


def test_a_dormant_weight_keeps_learning_and_can_be_revived():
    model = nn.Linear(2, 1, bias=False)
    model.weight.data.copy_(torch.tensor([[1.0, 0.9]]))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sparsifier = optg.sparsify(model, optimizer, DPF(schedule="constant", every=2), sparsity=0.5, epochs=1, steps_per_epoch=4)
    seen = [model.weight.tolist()[0]]
    for _ in range(4):
        model.weight.grad = torch.tensor([[0.0, -1.0]])  # the gradient of the pruned model asks for a larger second weight
        optimizer.step()
        seen.append([round(v, 6) for v in model.weight.tolist()[0]])
    # its latent value is 0.9, 1.0, 1.1, 1.2, 1.3; cuts are made before training and after 2 and 4 steps
    assert seen == [[1.0, 0.0], [1.0, 0.0], [0.0, 1.1], [0.0, 1.2], [0.0, 1.3]]
    assert sparsifier.weights.latent[0].tolist()[0] == pytest.approx([1.0, 1.3])
