"""Masks of every structure, compared with a slow and obvious oracle."""

import math
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor, nn

from optg.core import structures as structures_file
from optg.core.assignment import Assignment, parse_structure
from optg.core.exchange import exchange
from optg.core.floors import Floor
from optg.core.layer_kinds import Axes
from optg.core.masks import keep_top
from optg.core.passes.reference import power_threshold
from optg.core.structures import NM, Blocks, Unstructured
from optg.core.weights import SparseWeights

LAYERS = {  # shapes and axes of every kind of layer, with sizes that no structure divides
    "linear": ((3, 9), Axes()),
    "input first": ((9, 4), Axes(1, 0)),
    "attention": ((9, 5), Axes(0, 1, 3)),
    "experts": ((2, 3, 6), Axes(1, 2, 2)),
    "input-first experts": ((2, 7, 3), Axes(2, 1, 2)),
    "convolution": ((3, 5, 2, 2), Axes()),
    "transposed convolution": ((5, 3, 2, 2), Axes(1, 0)),
}
layers = st.lists(st.sampled_from(sorted(LAYERS)), min_size=1, max_size=3)
structures = st.sampled_from(["1:2", "2:4", "3:4", "1:4", "3:5", "1x2", "1x4", "2x1", "4x1", "2x2", "3x4"])
GRID = [n / 8 for n in range(-6, 7)]  # few values: many ties, and sums that are exact


def weights_of(names: list[str], text: str, target: float = 0.5) -> SparseWeights:
    parameters = {f"{i} {name}": nn.Parameter(torch.zeros(LAYERS[name][0])) for i, name in enumerate(names)}
    axes, structure = [LAYERS[name][1] for name in names], parse_structure(text)
    assigned = Assignment(parameters, axes, [structure] * len(names), text)
    optimizer = torch.optim.SGD(parameters.values(), lr=0.1, momentum=0.9)
    return SparseWeights(parameters, optimizer, assigned.target(None) or target, axes, assignment=assigned)


def indices(shape: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    for flat in range(math.prod(shape)):
        yield tuple(int(i) for i in torch.unravel_index(torch.tensor(flat), shape))


def unit_of(index: tuple[int, ...], shape: tuple[int, ...], axes: Axes, structure: Blocks) -> tuple[int, ...]:
    """Return the block of a weight; blocks do not span two parts."""
    unit = list(index)
    for dim, length in zip((axes.output, axes.input), structure.numbers):
        inside = shape[dim] // axes.parts if dim == axes.stacked else shape[dim]
        part, place = divmod(index[dim], inside)
        unit[dim] = part * -(-inside // length) + place // length
    return tuple(unit)


def units_of(shape: tuple[int, ...], axes: Axes, structure: Unstructured) -> dict[tuple[int, ...], list[tuple[int, ...]]]:
    """Return the weights of each unit."""
    found: dict[tuple[int, ...], list[tuple[int, ...]]] = {}
    for index in indices(shape):
        unit = unit_of(index, shape, axes, structure) if isinstance(structure, Blocks) else index
        found.setdefault(unit, []).append(index)
    return found


def protected(score: Tensor, axes: Axes, structure: Unstructured) -> set[tuple[int, ...]]:
    """Return the weights that N:M protects: of each group the N largest, the last ones of equals."""
    if not isinstance(structure, NM):
        return set()
    groups: dict[tuple[int, ...], list[tuple[int, ...]]] = {}
    for index in indices(tuple(score.shape)):
        key = list(index)
        key[axes.input] //= structure.m
        groups.setdefault(tuple(key), []).append(index)
    ordered = (sorted(members, key=lambda i: (score[i].item(), i[axes.input])) for members in groups.values())
    return {index for members in ordered for index in members[-structure.n :]}


def oracle(scores: list[Tensor], axes: list[Axes], structure: Unstructured, zeros: int) -> list[Tensor]:
    """Rank all units by their exact mean, in order of layer and index where equal, and remove the first."""
    ranked = []
    for layer, (score, axis) in enumerate(zip(scores, axes)):
        safe = protected(score, axis, structure)
        for unit, members in units_of(tuple(score.shape), axis, structure).items():
            if unit not in safe:
                ranked.append((sum(Fraction(score[i].item()) for i in members) / len(members), layer, unit, members))
    masks = [torch.ones_like(score, dtype=torch.bool) for score in scores]
    for _, layer, _, members in sorted(ranked, key=lambda entry: entry[:3])[:zeros]:
        for index in members:
            masks[layer][index] = False
    return masks


def draw_scores(data: st.DataObject, weights: SparseWeights, values: list[float] = GRID) -> list[Tensor]:
    numbers = st.sampled_from(values)
    return [
        torch.tensor(data.draw(st.lists(numbers, min_size=shape.numel(), max_size=shape.numel()))).view(shape)
        for shape in weights.shapes
    ]


@settings(max_examples=150, deadline=None)
@given(st.data(), layers, structures, st.floats(0, 1), st.booleans())
def test_cuts_are_those_of_the_oracle(data, names, text, progress, channels_last):
    weights = weights_of(names, text)
    scores = draw_scores(data, weights)
    pool = weights.mask_set.pools[0]
    zeros = round(progress * sum(pool.most))
    given = [s.to(memory_format=torch.channels_last) if channels_last and s.ndim == 4 else s for s in scores]
    weights.mask_set.cut(given, [zeros])
    expected = oracle(scores, weights.axes, pool.structure, zeros)
    for name, mask, wanted in zip(weights.names, weights.masks, expected):
        assert torch.equal(mask, wanted), name
    assert weights.mask_set.zero_units()[0] == zeros
    assert weights.counts[:, 0].tolist() == [int((~mask).sum()) for mask in expected]


@settings(max_examples=60, deadline=None)
@given(st.data(), layers, structures, st.sampled_from(["global", "uniform", "erk", "magnitude"]), st.floats(0, 0.99))
def test_every_budget_reaches_the_target_within_the_structure(data, names, text, budget, sparsity):
    weights = weights_of(names, text)
    for value, score in zip(weights.values, draw_scores(data, weights)):
        value.copy_(score)
    structure = weights.mask_set.pools[0].structure
    weights.cut([v.abs() for v in weights.values], min(sparsity, weights.target), budget)
    for mask, axis in zip(weights.masks, weights.axes):
        check_structure(mask, axis, structure)
    weights.cut([v.abs() for v in weights.values], weights.target, budget)
    assert weights.missing_zeros() == [0]
    for mask, axis in zip(weights.masks, weights.axes):
        check_structure(mask, axis, structure, final=True)


def check_structure(mask: Tensor, axes: Axes, structure: Unstructured, final: bool = False) -> None:
    """Blocks are kept or removed as a whole; groups of N:M keep at least N weights, in the end exactly N."""
    if isinstance(structure, NM):
        rows = mask.movedim(axes.input, 0)
        for group in rows.split(structure.m):
            least = min(structure.n, len(group))
            kept = group.sum(0)
            assert (kept >= least).all() and (not final or (kept == least).all())
        return
    for members in units_of(tuple(mask.shape), axes, structure).values():
        assert len({bool(mask[index]) for index in members}) == 1


@settings(max_examples=80, deadline=None)
@given(st.data(), layers, structures, st.floats(0, 1), st.floats(0.1, 1))
def test_exchanges_keep_structure_and_counts(data, names, text, share, progress):
    weights = weights_of(names, text)
    for value, score in zip(weights.values, draw_scores(data, weights)):
        value.copy_(score)
    structure = weights.mask_set.pools[0].structure
    weights.cut([v.abs() for v in weights.values], weights.target * progress)
    weights.show_effective()
    before, masks = weights.mask_set.zero_units(), [mask.clone() for mask in weights.masks]
    grow = dict(enumerate(draw_scores(data, weights, [n / 8 for n in range(9)])))
    grown = []
    exchange(weights.mask_set, share, weights.values, grow, lambda layer, where: grown.append((layer, where)))
    assert weights.mask_set.zero_units() == before
    for layer, where in grown:
        assert not (where & masks[layer]).any() and torch.equal(where, weights.masks[layer] & ~masks[layer])
    for mask, old, axis in zip(weights.masks, masks, weights.axes):
        check_structure(mask, axis, structure)
        if isinstance(structure, NM):  # each group grows as many as it lost
            assert torch.equal(per_group(mask, axis, structure.m), per_group(old, axis, structure.m))


def per_group(mask: Tensor, axes: Axes, m: int) -> Tensor:
    return torch.stack([group.sum(0) for group in mask.movedim(axes.input, 0).split(m)])


def test_an_exchange_drops_the_smallest_blocks_and_grows_those_with_the_largest_scores():
    weights = weights_of(["linear"], "1x4", target=0.5)  # 3 × 9: blocks of 4, 4 and 1
    weights.values[0].copy_(torch.tensor([[1, 1, 1, 1, 9, 9, 9, 9, 5], [0] * 9, [3, 3, 3, 3, 0, 0, 0, 0, 0]]))
    weights.cut([v.abs() for v in weights.values], 0.5)  # 5 of 9 blocks go
    assert weights.mask_set.pools[0].sample(weights.masks)[0].int().tolist() == [[1, 1, 1], [0, 0, 0], [1, 0, 0]]
    grow = torch.zeros(3, 9)
    grow[1, :4] = torch.tensor([0.0, 0.0, 4.0, 0.0])  # mean 1
    grow[1, 8] = 2.0
    weights.exchange(0.25, {0: grow})
    assert weights.mask_set.pools[0].sample(weights.masks)[0].int().tolist() == [[0, 1, 1], [0, 0, 1], [1, 0, 0]]


def test_two_of_four_by_hand():
    weights = weights_of(["linear"], "2:4")
    score = torch.tensor([[4.0, 1, 2, 3, 1, 1, 1, 1, 0], [9, 8, 7, 6, -1, -2, -3, -4, 5], [0, 0, 1, 0, 2, 2, 3, 3, -9]])
    weights.cut([score], weights.target)
    expected = [[1, 0, 0, 1, 0, 0, 1, 1, 1], [1, 1, 0, 0, 1, 1, 0, 0, 1], [0, 0, 1, 1, 0, 0, 1, 1, 1]]
    assert weights.masks[0].int().tolist() == expected


def test_a_schedule_passes_through_intermediate_densities():
    """Between dense and 2:4, the smallest weights of all groups go first; no group falls below 2 of 4."""
    weights = weights_of(["linear"], "2:4")
    score = torch.arange(27.0).view(3, 9)
    weights.cut([score], weights.target / 2)
    removed = (~weights.masks[0]).nonzero().tolist()
    assert removed == [[0, 0], [0, 1], [0, 4], [0, 5], [1, 0], [1, 1]]


def test_scores_of_blocks_do_not_depend_on_the_order_of_their_weights():
    """Sums of floats would: 1e8 and −1e8 cancel first, last, or not at all."""
    values = torch.tensor([1e8, 1.0, -1e8, 1.0])
    weights = weights_of(["input first"], "4x1")  # 9 inputs × 4 outputs in a block
    found = []
    for order in ([0, 1, 2, 3], [0, 2, 1, 3], [3, 1, 0, 2]):
        score = values[order].expand(9, 4).contiguous()
        found.append(weights.mask_set.pools[0].unit_scores([score])[0])
    assert all(torch.equal(scores, torch.full((9, 1), 0.5, dtype=torch.float64)) for scores in found)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_scores_of_blocks_of_half_precision_are_exact(dtype):
    """float16 holds 6e-8 to 65504: scaled by one power of two, the smallest must not vanish nor the largest overflow."""
    weights = weights_of(["input first"], "4x1")
    values = torch.tensor([60000.0, 30000.0, 8.0, 4.0, 1e-5, 2e-5, 3e-5, 6e-8, 0.0], dtype=dtype)
    (units,) = weights.mask_set.pools[0].unit_scores([values[:, None].repeat(1, 4)])
    assert torch.equal(units[:, 0], values.double())


@pytest.mark.parametrize("text", ["2:4", "1x4"])
def test_nan_in_the_scores_is_refused_by_name(text):
    weights = weights_of(["linear", "convolution"], text)
    scores = [torch.rand(shape) for shape in weights.shapes]
    scores[1][0, 0, 0, 0] = math.nan
    with pytest.raises(FloatingPointError, match="1 convolution"):
        weights.cut(scores, weights.target)
    grow = {i: torch.rand(shape) for i, shape in enumerate(weights.shapes)}
    grow[0][0, 0] = math.nan
    with pytest.raises(FloatingPointError, match="0 linear"):
        weights.exchange(0.5, grow)


@pytest.mark.parametrize("text", ["2:4", "1x4", "4x1"])
def test_units_that_were_removed_for_good_rank_below_all_others(text):
    """Methods that never revive weights rank removed ones at −inf."""
    weights = weights_of(["convolution", "input first"], text)
    generator = torch.Generator().manual_seed(0)
    scores = [torch.randn(shape, generator=generator) for shape in weights.shapes]
    weights.cut(scores, weights.target / 2)
    first = [mask.clone() for mask in weights.masks]
    new = [torch.randn(s, generator=generator).where(mask, -math.inf) for s, mask in zip(weights.shapes, first)]
    weights.cut(new, weights.target)
    assert weights.missing_zeros() == [0]
    for mask, before in zip(weights.masks, first):
        assert not (mask & ~before).any()


def test_single_weights_are_ranked_as_without_structures():
    weights = weights_of(["linear", "convolution", "attention"], "unstructured", target=0.7)
    scores = [torch.randn(shape) for shape in weights.shapes]
    weights.cut(scores, 0.7)
    assert all(map(torch.equal, weights.masks, keep_top(scores, math.ceil(0.7 * weights.size))))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("4:2", r"expected N:M with 0 < N < M ≤ 64"),
        ("0:4", r"expected N:M with 0 < N < M ≤ 64"),
        ("2:65", r"expected N:M with 0 < N < M ≤ 64"),
        ("1x1", r"expected RxC with 2 to 4096 weights"),
        ("0x4", r"expected RxC with 2 to 4096 weights"),
        ("2/4", r"unknown structure '2/4'; expected a text like 'unstructured', '2:4', '1x4', 'channel'"),
        ("", "unknown structure ''"),
        (None, "unknown structure None"),
    ],
)
def test_wrong_structures_are_refused(text, message):
    with pytest.raises(ValueError, match=message):
        parse_structure(text)


@pytest.mark.parametrize("text", ["unstructured", "2:4", "4:64", "1x4", "16x2", "channel"])
def test_a_structure_prints_as_it_is_written(text):
    assert str(parse_structure(text)) == text


def soften(weights: SparseWeights, latent: list[Tensor], t: float, p: float) -> list[Tensor]:
    """Return the effective weights of a soft threshold, as Feather computes them."""
    thresholds = torch.full((len(latent),), t)
    weights.measure_ratios(latent, thresholds)
    return [power_threshold(w, thresholds[i], p, weights.threshold_ratio(i)) for i, w in enumerate(latent)]


@settings(max_examples=40, deadline=None)
@given(st.data(), layers, st.sampled_from(["1x2", "2x1", "3x4"]), st.sampled_from([1.0, 3.0]))
def test_a_soft_threshold_shrinks_all_weights_of_a_block_alike(data, names, text, p):
    weights = weights_of(names, text)
    latent = draw_scores(data, weights)
    structure = weights.mask_set.pools[0].structure
    for value, w, axes in zip(soften(weights, latent, 0.25, p), latent, weights.axes):
        for members in units_of(tuple(w.shape), axes, structure).values():
            s = sum(abs(w[i].item()) for i in members) / len(members)
            factor = (1 - (0.25 / s) ** p) ** (1 / p) if s > 0.25 else 0.0
            for i in members:
                assert value[i].item() == pytest.approx(factor * w[i].item(), abs=1e-6)


def test_the_threshold_of_a_group_is_its_largest_removed_magnitude():
    weights = weights_of(["linear"], "2:4")
    latent = torch.tensor([[4.0, -1, 2, -3, 0, 0, 0, 0, 5]]).repeat(3, 1)
    weights.cut([latent.abs()], weights.target)
    value = soften(weights, [latent], 1.0, 1.0)[0] * weights.masks[0]
    assert torch.allclose(value, torch.tensor([[2.0, 0, 0, -1, 0, 0, 0, 0, 5]]).repeat(3, 1))


def test_in_a_group_that_keeps_all_weights_nothing_shrinks():
    weights = weights_of(["linear"], "2:4")
    latent = torch.rand(3, 9)
    value = soften(weights, [latent], 0.5, 3.0)[0]
    assert torch.equal(value, latent)


def test_a_floor_does_not_stop_exchanges_under_nm():
    """Every group keeps N weights anyway, so the floor asks for nothing more."""
    weights = weights_of(["linear"], "2:4")
    weights.mask_set.set_floor(Floor(0.1), weights.target)
    generator = torch.Generator().manual_seed(0)
    weights.values[0].copy_(torch.randn(3, 9, generator=generator))
    weights.cut([weights.values[0].abs()], weights.target)
    before = weights.masks[0].clone()
    weights.exchange(0.5, {0: torch.rand(3, 9, generator=generator)})
    assert not torch.equal(weights.masks[0], before)
    check_structure(weights.masks[0], weights.axes[0], weights.mask_set.pools[0].structure, final=True)


def test_all_structures_fit_in_one_short_file():
    assert len(Path(structures_file.__file__).read_text().splitlines()) < 250
