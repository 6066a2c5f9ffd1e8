"""Quantize and compile random networks, and compare every part that runs on bytes with the integer reference.

OPTG_NETS=500 pytest tests/deploy/engine/int8/test_random_nets.py tries more.
"""

import os
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import optg
from optg.deploy.engine.int8.segment import Int8Segment
from tests.deploy.engine.int8 import reference
from tests.deploy.test_random_nets import Net

NETS = int(os.environ.get("OPTG_NETS", "8"))


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Compare every run of a segment with the reference. Return the names of the values that were compared."""
    names: list[str] = []
    run = Int8Segment.run

    def run_and_compare(self: Int8Segment, value: Callable[[str], Tensor], batch: int, runner: Any) -> dict[str, Tensor]:
        made = run(self, value, batch, runner)
        expected = reference.run_segment(self, {name: value(name).numpy() for name in self.inputs})
        for name, got in made.items():
            assert torch.equal(got, torch.from_numpy(expected[name]).reshape(got.shape)), name
            names.append(name)
        return made

    monkeypatch.setattr(Int8Segment, "run", run_and_compare)
    return names


@pytest.mark.parametrize("seed", range(2, 2 + NETS))  # torchao takes 10 s for the nets of seeds 0 and 1
def test_random_net_equals_the_reference(seed: int, checked: list[str], poisoned_bytes: None) -> None:
    r = random.Random(seed)
    torch.manual_seed(seed)
    shape = r.choice([1, 3, 4, 16]), r.choice([2, 4, 7, 8, 13, 16]), r.choice([3, 4, 8, 14, 16, 31])
    model = Net(r, torch.randn(1, *shape)).eval()
    quantized = optg.quantize(model, [torch.randn(4, *shape)])
    fast = optg.compile(quantized, torch.randn(2, *shape), threads=r.choice([1, 2]))
    for batch in r.sample((1, 2, 3, 8, 17), 2):
        fast(torch.randn(batch, *shape))
    assert checked or not any(name.endswith("weight") for name in quantized.state_dict())
