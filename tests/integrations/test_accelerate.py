"""accelerate: `sparsify` before and after `prepare`, and its checkpoints."""

from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from torch import nn

import optg
from tests.integrations.zeros import expected_zeros, zeros


def train(after: bool, accumulate: int = 1, precision: str = "no") -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = torch.utils.data.DataLoader(torch.randn(64, 8), batch_size=8)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulate, mixed_precision=precision)
    if not after:
        sparsifier = optg.sparsify(model, optimizer, sparsity=0.9, steps=4 * len(loader) // accumulate)
    prepared, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    if after:
        sparsifier = optg.sparsify(prepared, optimizer, sparsity=0.9, steps=4 * len(loader) // accumulate)
    for _ in range(4):
        for batch in loader:
            with accelerator.accumulate(prepared):
                accelerator.backward((prepared(batch).squeeze(1) - batch.sum(1)).square().mean())
                optimizer.step()
                optimizer.zero_grad()
    assert sparsifier.clock.finished
    sparsifier.finish()
    return model


@pytest.mark.parametrize("precision", ["no", "bf16"])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_sparsify_before_and_after_prepare(accumulate: int, precision: str) -> None:
    before, after = train(False, accumulate, precision), train(True, accumulate, precision)
    assert zeros(before) == zeros(after) == expected_zeros(before, 0.9)
    assert torch.equal(before[0].weight, after[0].weight)


@pytest.mark.parametrize("method", ["optg", "feather"])
def test_a_registered_sparsifier_resumes_bit_for_bit(method: str, tmp_path: Path) -> None:
    data, weights = torch.randn(32, 8, 8, generator=torch.Generator().manual_seed(0)), []
    for resume in (False, True):
        torch.manual_seed(0)
        accelerator, model = Accelerator(cpu=True), nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
        model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
        sparsifier = optg.sparsify(model, optimizer, method, sparsity=0.9, steps=len(data))
        accelerator.register_for_checkpointing(sparsifier)
        if resume:
            accelerator.load_state(str(tmp_path))
        for batch in data[13 if resume else 0 :]:
            optimizer.zero_grad()
            accelerator.backward((model(batch).squeeze(1) - batch.sum(1)).square().mean())
            optimizer.step()
            if sparsifier.clock.step == 13:
                accelerator.save_state(str(tmp_path))
        sparsifier.finish()
        weights.append([*model.parameters()])
        assert zeros(model) >= expected_zeros(model, 0.9)
    assert all(map(torch.equal, *weights))
