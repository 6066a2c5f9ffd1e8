"""The passes on the CPU, which work on the bits of floats and visit large layers in blocks, against `torch.where`."""

import math

import pytest
import torch

from optg.core.passes import reference

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


def example(dtype: torch.dtype, shape: tuple[int, ...] = (257, 129)) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return values and others with every kind of float in them, and a mask."""
    g = torch.Generator().manual_seed(0)
    tensors = [torch.randn(shape, generator=g, dtype=torch.float64).to(dtype) for _ in range(2)]
    for tensor in tensors:
        for i, special in enumerate(
            (math.nan, math.inf, -math.inf, -0.0, 0.0, torch.finfo(dtype).max, torch.finfo(dtype).tiny)
        ):
            tensor.view(-1)[i::71] = special
    return *tensors, torch.rand(shape, generator=g) > 0.5


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(reference.bits(a), reference.bits(b))


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(reference, "CHUNK", 1000)


@pytest.mark.parametrize("dtype", DTYPES)
def test_removed_values_become_zero_or_a_share_and_kept_ones_stay_bit_for_bit(dtype):
    value, _, kept = example(dtype)
    zeroed, shared = value.clone(), value.clone()
    reference.mask([zeroed], [kept])
    reference.mask([shared], [kept], 0.25)
    assert same_bits(zeroed, torch.where(kept, value, torch.zeros((), dtype=dtype)))
    assert same_bits(shared[kept], value[kept])  # elsewhere a NaN may get other bits: those of a product are not defined
    torch.testing.assert_close(shared, torch.where(kept, value, value * 0.25), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES)
def test_dormant_values_are_stored_and_restored_bit_for_bit(dtype):
    value, latent, kept = example(dtype)
    restored, stored, settled = value.clone(), latent.clone(), value.clone()
    reference.restore([restored], [kept], [latent])
    assert same_bits(restored, torch.where(kept, value, latent))
    reference.settle([settled], [kept], [stored])
    assert same_bits(stored, value) and same_bits(settled, torch.where(kept, value, torch.zeros((), dtype=dtype)))


@pytest.mark.parametrize("layout", ["channels_last", "transposed", "scalar", "empty"])
def test_any_layout_is_masked(layout):
    shape = {"scalar": (), "empty": (0, 3)}.get(layout, (40, 8, 5, 5))
    value, kept = torch.randn(shape), torch.rand(shape) > 0.5
    if layout == "channels_last":
        value = value.to(memory_format=torch.channels_last)
    elif layout == "transposed":
        value = value.transpose(0, 3)
        kept = torch.rand(value.shape) > 0.5
    expected = torch.where(kept, value, 0.0)
    reference.mask([value], [kept])
    assert torch.equal(value, expected)


@pytest.mark.parametrize("skipped", [None, False, True])
def test_blocks_accumulate_the_same_scores(monkeypatch, skipped):
    found = []
    for chunk in (1000, 1 << 30):
        monkeypatch.setattr(reference, "CHUNK", chunk)
        g = torch.Generator().manual_seed(1)
        grads, values, momenta, scores = ([torch.randn(64, 64, generator=g)] for _ in range(4))
        masks, flag = [torch.rand(64, 64, generator=g) > 0.5], None if skipped is None else torch.tensor(skipped)
        before = [t.clone() for t in (grads[0], values[0], momenta[0], scores[0])]
        reference.accumulate(grads, masks, values, momenta, scores, [torch.tensor(0.1)], 0.9, flag)
        found.append([*grads, *momenta, *scores])
        m = before[2] * (1.0 if skipped else 0.9) + before[0] * before[1]
        torch.testing.assert_close(momenta[0], m)
        torch.testing.assert_close(scores[0], before[3] - 0.1 * m)
    assert all(map(same_bits, *found))
