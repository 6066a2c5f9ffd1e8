"""Models and optimizers inside other packages' wrappers, and several optimizers: Fabric, timm's averages, Muon with AdamW."""

import copy
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from timm.utils import ModelEma, ModelEmaV2, ModelEmaV3
from torch import nn
from torch.optim.swa_utils import AveragedModel

import optg
from tests.integrations.zeros import expected_zeros, zeros

STEPS = 40


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))


def train(model: nn.Module, *optimizers: Any, steps: int = STEPS, backward: Any = torch.Tensor.backward) -> None:
    for _ in range(steps):
        for optimizer in optimizers:
            optimizer.zero_grad()
        batch = torch.randn(16, 8)
        backward((model(batch).squeeze(1) - batch.sum(1)).square().mean())
        for optimizer in optimizers:
            optimizer.step()


def test_fabric_after_setup() -> None:
    """The state is that of the bare model: it continues in a plain loop."""
    fabric, model = Fabric(accelerator="cpu", devices=1), net()
    wrapped, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    sparsifier = optg.sparsify(wrapped, optimizer, sparsity=0.9, steps=STEPS)
    assert list(sparsifier.masks) == ["0.weight", "2.weight"]
    train(wrapped, optimizer, steps=STEPS // 2, backward=fabric.backward)
    plain, state = copy.deepcopy(model), sparsifier.state_dict()
    train(wrapped, optimizer, steps=STEPS // 2, backward=fabric.backward)
    sparsifier.finish()
    assert zeros(model) == expected_zeros(model, 0.9)
    continued = optg.sparsify(plain, torch.optim.AdamW(plain.parameters(), lr=1e-2), sparsity=0.9, steps=STEPS)
    continued.load_state_dict(state)
    train(plain, *continued.optimizers, steps=STEPS // 2)
    continued.finish()
    assert zeros(plain) == expected_zeros(plain, 0.9)


def sparse_net() -> tuple[nn.Module, optg.Sparsifier]:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    sparsifier = optg.sparsify(model, optimizer, sparsity=0.9, steps=STEPS)
    train(model, optimizer)
    sparsifier.finish()
    return model, sparsifier


@pytest.mark.parametrize("average", [ModelEma, ModelEmaV2, ModelEmaV3, AveragedModel])
def test_masks_are_applied_to_averages(average: Any) -> None:
    model, sparsifier = sparse_net()
    dense = average(net())
    averaged = dense.ema if average is ModelEma else dense.module
    assert zeros(averaged) == 0
    sparsifier.apply_masks(dense)
    assert zeros(averaged) == zeros(model) == expected_zeros(model, 0.9)


class EMAModel:
    """Has the interface of diffusers' average, which is not a module."""

    def __init__(self, parameters: Any) -> None:
        self.shadow_params = [p.detach().clone() for p in parameters]

    def copy_to(self, parameters: Any) -> None:
        for p, shadow in zip(parameters, self.shadow_params):
            p.data.copy_(shadow)


def test_the_advice_for_averages_that_are_no_modules() -> None:
    model, sparsifier = sparse_net()
    ema = EMAModel(net().parameters())
    with pytest.raises(TypeError, match=r"ema\.copy_to\(model\.parameters\(\)\), then call apply_masks on that model"):
        sparsifier.apply_masks(ema)
    ema.copy_to(model.parameters())
    assert zeros(model) == 0
    sparsifier.apply_masks(model)
    assert zeros(model) == expected_zeros(model, 0.9)


@pytest.mark.parametrize("first", [["0.weight", "2.weight"], ["0.weight"]])
def test_muon_and_adamw_share_a_budget(first: list[str]) -> None:
    model = net()
    muon = torch.optim.Muon([p for name, p in model.named_parameters() if name in first], lr=1e-2)
    adamw = torch.optim.AdamW([p for name, p in model.named_parameters() if name not in first], lr=1e-3)
    sparsifier = optg.sparsify(model, [muon, adamw], sparsity=0.9, steps=STEPS)
    train(model, muon, adamw)
    assert sparsifier.clock.finished
    sparsifier.finish()
    assert zeros(model) == expected_zeros(model, 0.9)
