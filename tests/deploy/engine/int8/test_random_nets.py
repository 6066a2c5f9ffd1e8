"""Quantize and compile random networks, and compare every part that runs on bytes with the integer reference.

OPTG_NETS=500 pytest tests/deploy/engine/int8/test_random_nets.py tries more.
"""

import os
import random

import pytest
import torch

import optg
from tests.deploy.engine.int8 import reference
from tests.deploy.test_random_nets import Net

NETS = int(os.environ.get("OPTG_NETS", "8"))


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch) -> reference.Arrays:
    """Compare every run of a segment with the reference. Return the values that were computed."""
    return reference.compare_runs(monkeypatch)


@pytest.mark.parametrize("seed", range(2, 2 + NETS))  # torchao takes 10 s for the nets of seeds 0 and 1
def test_random_net_equals_the_reference(seed: int, checked: reference.Arrays, poisoned_bytes: None) -> None:
    r = random.Random(seed)
    torch.manual_seed(seed)
    shape = r.choice([1, 3, 4, 16]), r.choice([2, 4, 7, 8, 13, 16]), r.choice([3, 4, 8, 14, 16, 31])
    model = Net(r, torch.randn(1, *shape)).eval()
    quantized = optg.quantize(model, [torch.randn(4, *shape)])
    fast = optg.compile(quantized, torch.randn(2, *shape), threads=r.choice([1, 2]))
    for batch in r.sample((1, 2, 3, 8, 17), 2):
        fast(torch.randn(batch, *shape))
    assert checked or not any(name.endswith("weight") for name in quantized.state_dict())
