"""The fused kernel for crops and flips against torch: in Triton's interpreter, and on a GPU if there is one."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from optg.data import augment

ROOT = Path(__file__).parents[2]
CASES = [((50, 3, 32, 32), 4), ((7, 1, 9, 5), 2), ((4, 2, 40, 30), 1)]  # shape of the dataset, pad


def compare_with_torch(device: str) -> None:
    """Check that both implementations give the same bits."""
    from optg.data import fused

    random = torch.Generator().manual_seed(0)
    for shape, pad in CASES:
        count, channels, batch = shape[0], shape[1], 20
        images = torch.randint(256, shape, dtype=torch.uint8, generator=random)
        index = torch.randint(count, (batch,), generator=random)
        top, left = torch.randint(2 * pad + 1, (2, batch), generator=random)
        flip = torch.randint(2, (batch,), generator=random).bool()
        mean, std = 255 * torch.rand(2, channels, 1, 1, generator=random) + 1e-3
        given = [value.to(device) for value in (images, index, top, left, flip)]
        options = pad, mean.to(device), std.to(device)
        expected = augment.crop_flip_normalise(*given, *options)
        assert torch.equal(fused.crop_flip_normalise(*given, *options), expected)


def test_the_kernel_gives_the_bits_of_torch_in_tritons_interpreter() -> None:
    pytest.importorskip("triton")
    command = [sys.executable, "-c", "from tests.data.test_fused_crop import *; compare_with_torch('cpu')"]
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT, timeout=300)
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_the_kernel_gives_the_bits_of_torch_on_a_gpu() -> None:
    compare_with_torch("cuda")


def test_the_cpu_uses_torch() -> None:
    assert augment.choose_augmentation(torch.device("cpu")) is augment.crop_flip_normalise
