import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from optg.core.budgets import fill, layer_zeros
from optg.core.ranking import zeros_at

SHAPES = [torch.Size(s) for s in [(64, 3, 3, 3), (64, 64, 3, 3), (512, 512, 3, 3), (10, 512)]]


def test_uniform_by_hand():
    # 1,728 + 36,864 + 2,359,296 + 5,120 = 2,403,008 weights, of which 10 % stay: 172.8, 3686.4, 235929.6 and 512
    zeros = layer_zeros("uniform", SHAPES, 0.9)
    assert [s.numel() - z for s, z in zip(SHAPES, zeros)] == [173, 3686, 235929, 512]


def test_erk_by_hand():
    # numel × (sum of dimensions / numel) = the sum of dimensions: 73, 134, 1030, 522. At 90 % there are 240,300 to keep; the
    # factor 240300 / 1759 = 136.6 asks for more than there is of layers 0 and 3 (1,728 and 5,120): both stay whole, and the
    # others share 240300 − 1728 − 5120 = 233,452 as 134 : 1030.
    zeros = layer_zeros("erk", SHAPES, 0.9)
    assert [s.numel() - z for s, z in zip(SHAPES, zeros)] == [1728, 26875, 206577, 5120]


@given(
    dims=st.lists(st.lists(st.integers(1, 40), min_size=2, max_size=4), min_size=1, max_size=8),
    sparsity=st.floats(0, 0.9999),
    budget=st.sampled_from(["uniform", "erk"]),
)
def test_budgets_add_up_and_fit(dims, sparsity, budget):
    shapes = [torch.Size(d) for d in dims]
    zeros = layer_zeros(budget, shapes, sparsity)
    assert sum(zeros) == zeros_at(sparsity, sum(s.numel() for s in shapes))
    assert all(0 <= z <= s.numel() for z, s in zip(zeros, shapes))


def test_remainders_decide():
    assert fill([1.0, 1.0, 1.0], [10, 10, 10], 10) == [4, 3, 3]
    assert fill([1.0, 2.0], [10, 10], 5) == [2, 3]


@pytest.mark.parametrize("kept", range(0, 31))
def test_every_count_can_be_met(kept):
    assert sum(fill([5.0, 1.0, 0.1], [2, 8, 20], kept)) == kept
