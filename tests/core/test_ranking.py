"""Exact selection: every mask equals the mask of a stable sort."""

import math

import hypothesis.extra.numpy as hnp
import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings

from optg.core.masks import keep_top
from optg.core.passes import reference
from optg.core.ranking import raise_top, top_of, zeros_at


def masks_by_sorting(scores, zeros):
    """Remove the first scores of a stable sort: slow and obvious."""
    flat = torch.cat([s.reshape(-1) for s in scores]) + 0.0
    keep = torch.ones(len(flat), dtype=torch.bool)
    keep[torch.sort(flat, stable=True).indices[:zeros]] = False
    return [part.view(s.shape) for part, s in zip(keep.split([s.numel() for s in scores]), scores)]


def assert_same_as_sorting(scores, zeros):
    got, expected = keep_top(scores, zeros), masks_by_sorting(scores, zeros)
    assert sum(int((~m).sum()) for m in got) == zeros
    for a, b in zip(got, expected):
        assert torch.equal(a, b)


EDGE_CASES = [0.0, -0.0, 1.0, -1.0, 1e-45, -1e-45, 1.1754944e-38, 3e38, -3e38, math.inf, -math.inf, 1.0 + 2**-23]
shapes = st.lists(hnp.array_shapes(min_dims=1, max_dims=3, max_side=5), min_size=1, max_size=5)


@settings(max_examples=300, deadline=None)
@given(data=st.data(), shapes=shapes, width=st.sampled_from([32, 64]), sparsity=st.floats(0, 1))
def test_masks_equal_those_of_a_stable_sort(data, shapes, width, sparsity):
    floats = st.floats(allow_nan=False, width=width) | st.sampled_from(EDGE_CASES)
    if data.draw(st.booleans(), label="few values"):
        floats = st.sampled_from(data.draw(st.lists(floats, min_size=1, max_size=3)))
    arrays = [data.draw(hnp.arrays(f"float{width}", shape, elements=floats)) for shape in shapes]
    scores = [torch.from_numpy(np.ascontiguousarray(a)) for a in arrays]
    assert_same_as_sorting(scores, zeros_at(sparsity, sum(s.numel() for s in scores)))


@pytest.mark.parametrize("zeros, kept", [(0, "11111"), (1, "10111"), (2, "10011"), (3, "10001"), (4, "00001"), (5, "00000")])
def test_ties_go_by_index_over_all_tensors(zeros, kept):
    masks = keep_top([torch.tensor([3.0, 1.0]), torch.tensor([[2.0], [2.0], [3.0]])], zeros)
    assert "".join(str(int(x)) for m in masks for x in m.flatten()) == kept


def test_negative_zero_equals_zero():
    masks = keep_top([torch.tensor([0.0, -0.0, 0.0, -0.0])], 2)
    assert masks[0].tolist() == [False, False, True, True]


def test_ties_go_by_index_in_any_memory_layout():
    tied = torch.zeros(2, 3, 4, 5)
    plain = keep_top([tied], 50)
    for other in (tied.to(memory_format=torch.channels_last), tied.permute(3, 1, 2, 0).contiguous().permute(3, 1, 2, 0)):
        assert torch.equal(keep_top([other], 50)[0], plain[0])
    scores = torch.randn(8, 6, 3, 3, generator=torch.Generator().manual_seed(0))
    assert torch.equal(keep_top([scores.to(memory_format=torch.channels_last)], 300)[0], keep_top([scores], 300)[0])


def test_ties_across_chunks(monkeypatch):
    monkeypatch.setattr(reference, "CHUNK", 7)
    g = torch.Generator().manual_seed(0)
    scores = [torch.randint(0, 3, (n, 5), generator=g).float() for n in (4, 1, 9)]
    for zeros in range(0, 71, 3):
        assert_same_as_sorting(scores, zeros)


def test_tensors_larger_than_a_chunk():
    g = torch.Generator().manual_seed(0)
    scores = [torch.randn(700, 1000, generator=g), torch.randn(5, generator=g)]
    assert_same_as_sorting(scores, 665_005)


def test_bfloat16_scores_are_ranked_like_float32():
    scores = torch.randn(1000, generator=torch.Generator().manual_seed(0)).bfloat16()
    assert torch.equal(keep_top([scores], 900)[0], masks_by_sorting([scores.float()], 900)[0])


def test_the_error_names_layers_with_nan():
    scores = [torch.zeros(3), torch.tensor([0.0, math.nan]), torch.zeros(0)]
    with pytest.raises(FloatingPointError, match=r"NaN in the scores of conv\.weight: training has diverged"):
        keep_top(scores, 1, names=["fc.weight", "conv.weight", "empty"])


def test_the_number_of_zeros_is_rounded_up():
    assert [zeros_at(p, n) for p, n in [(0.9, 1000), (0.95, 101), (0.5, 3), (0.0, 7), (0.999, 10)]] == [900, 96, 2, 0, 10]


@settings(max_examples=150, deadline=None)
@given(st.data(), hnp.array_shapes(min_dims=2, max_dims=4, min_side=2, max_side=11), st.sampled_from([32, 64]))
def test_the_largest_of_neighbours_become_infinite(data, shape, width):
    """Twice: by sweeps over memory, as on a CPU, and group by group. Ties go to the last ones."""
    values = st.sampled_from([0.0, -0.0, 1.0, -1.0, 2.0, 3e38, math.inf, -math.inf])
    score = torch.from_numpy(data.draw(hnp.arrays(f"f{width // 8}", shape, elements=values)))
    if data.draw(st.booleans(), label="transposed"):
        score = score.transpose(0, -1)
    dim = data.draw(st.integers(0, score.ndim - 1))
    m = data.draw(st.integers(2, max(2, score.shape[dim])))
    n = data.draw(st.integers(1, m - 1))
    expected = score.clamp(max=torch.finfo(score.dtype).max)
    for group, new in zip(score.split(m, dim), expected.split(m, dim)):
        first = group.argsort(dim=dim, stable=True).argsort(dim=dim) < group.shape[dim] - n
        new.masked_fill_(~first, math.inf)
        assert torch.equal(top_of(group, dim, n), ~first)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("optg.core.ranking.CHUNK", data.draw(st.sampled_from([1, 50, 1 << 17])))
        assert torch.equal(raise_top(score, dim, n, m), expected)
