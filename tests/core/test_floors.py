"""Floors hold in every mask of every method, and cost no exactness."""

import copy
import math
import warnings

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import nn

import optg
from optg.core.budgets import BUDGETS, layer_zeros
from optg.core.floors import Floor
from optg.core.layer_kinds import Axes
from optg.core.ranking import zeros_at
from optg.core.weights import SparseWeights
from optg.methods import GMP, METHODS, STR, Method
from tests.methods.test_contract import EPOCHS, OPTIMIZERS, STEPS, short
from tests.toy import batches, convnet, entropy, step

LAYERS = {  # shapes and axes of every kind of layer
    "linear": ((4, 6), Axes()),
    "input first": ((5, 4), Axes(1, 0)),
    "attention": ((6, 4), Axes(0, 1, 3)),
    "experts": ((2, 3, 4), Axes(1, 2, 2)),
    "input-first experts": ((3, 2, 4), Axes(2, 1, 3)),
    "convolution": ((3, 2, 2, 2), Axes()),
    "transposed convolution": ((2, 3, 2, 2), Axes(1, 0)),
}
layers = st.lists(st.sampled_from(sorted(LAYERS)), min_size=1, max_size=4)
shares = st.sampled_from([0.01, 0.1, 0.2, 0.3, 0.5])


def group_of(index: tuple[int, ...], shape: tuple[int, ...], axes: Axes, by: str) -> tuple[int, ...]:
    """The part or output neuron that a weight belongs to, from its index."""
    stacked = axes.output if 0 in (axes.output, axes.input) else 0
    if by == "part":
        return (index[stacked] // (shape[stacked] // axes.parts),)
    return index[stacked], index[axes.output]


def groups(shape: tuple[int, ...], axes: Axes, by: str) -> dict[tuple[int, ...], list[int]]:
    """The flat indices of the weights of each group."""
    found: dict[tuple[int, ...], list[int]] = {}
    for flat in range(math.prod(shape)):
        index = tuple(int(i) for i in torch.unravel_index(torch.tensor(flat), shape))
        found.setdefault(group_of(index, shape, axes, by), []).append(flat)
    return found


def protected(score: torch.Tensor, axes: Axes, floor: Floor) -> set[int]:
    flat = score.flatten().tolist()
    found: set[int] = set()
    for members in groups(tuple(score.shape), axes, floor.by).values():
        found |= set(sorted(members, key=lambda i: (flat[i], i))[-math.ceil(floor.share * len(members)) :])
    return found


def oracle(scores: list[torch.Tensor], axes: list[Axes], floor: Floor, zeros: int) -> list[torch.Tensor]:
    """Protect, sort the rest, remove the first: slow and obvious."""
    safe = [protected(score, axis, floor) for score, axis in zip(scores, axes)]
    rest = [
        (value, layer, i)
        for layer, score in enumerate(scores)
        for i, value in enumerate(score.flatten().tolist())
        if i not in safe[layer]
    ]
    masks = [torch.ones(score.numel(), dtype=torch.bool) for score in scores]
    for _, layer, i in sorted(rest)[:zeros]:
        masks[layer][i] = False
    return [mask.view(score.shape) for mask, score in zip(masks, scores)]


def make_weights(names: list[str], floor: Floor | None, target: float = 0.0) -> SparseWeights:
    parameters = {f"{i} {name}": nn.Parameter(torch.zeros(LAYERS[name][0])) for i, name in enumerate(names)}
    optimizer = torch.optim.SGD(parameters.values(), lr=0.1)
    weights = SparseWeights(parameters, optimizer, target, [LAYERS[name][1] for name in names])
    if floor:
        weights.mask_set.set_floor(floor, target)
    return weights


def floor_holds(weights: SparseWeights, floor: Floor) -> bool:
    for mask, axes in zip(weights.masks, weights.axes):
        kept = mask.flatten().tolist()
        for members in groups(tuple(mask.shape), axes, floor.by).values():
            if sum(kept[i] for i in members) < math.ceil(floor.share * len(members)):
                return False
    return True


@settings(max_examples=150, deadline=None)
@given(st.data(), layers, shares, st.sampled_from(["part", "output"]), st.booleans())
def test_cuts_are_those_of_the_oracle(data, names, share, by, few_values):
    floor = Floor(share, by)
    weights = make_weights(names, floor)
    floats = st.sampled_from([0.0, -0.0, 1.0, math.inf, -math.inf]) if few_values else st.floats(-9, 9, width=32)
    scores = [torch.tensor(data.draw(st.lists(floats, min_size=s.numel(), max_size=s.numel()))).view(s) for s in weights.shapes]
    room = sum(weights.mask_set.pools[0].most)
    zeros = data.draw(st.integers(0, room))
    weights.mask_set.cut(scores, [zeros])
    assert all(torch.equal(a, b) for a, b in zip(weights.masks, oracle(scores, weights.axes, floor, zeros)))
    assert floor_holds(weights, floor) and int(weights.counts[:, 0].sum()) == zeros


@settings(max_examples=100, deadline=None)
@given(layers, shares, st.sampled_from(["part", "output"]), st.floats(0, 1), st.integers(0, 9))
def test_exchanges_keep_the_floor_and_the_count(names, share, by, moved, seed):
    floor = Floor(share, by)
    weights = make_weights(names, floor)
    generator = torch.Generator().manual_seed(seed)
    for value in weights.values:
        value.copy_(torch.randn(value.shape, generator=generator))
    zeros = sum(weights.mask_set.pools[0].most) - seed % 3
    weights.mask_set.cut([v.abs() for v in weights.values], [max(zeros, 0)])
    before = weights.counts[:, 0].tolist()
    weights.show_effective()
    weights.exchange(moved, {i: torch.rand(v.shape, generator=generator) for i, v in enumerate(weights.values)})
    assert weights.counts[:, 0].tolist() == before and floor_holds(weights, floor)


@settings(max_examples=100, deadline=None)
@given(layers, shares, st.sampled_from(["part", "output"]), st.sampled_from([*BUDGETS, "magnitude"]), st.floats(0, 0.99))
def test_budgets_leave_room_for_the_floor(names, share, by, budget, sparsity):
    floor = Floor(share, by)
    weights = make_weights(names, floor)
    if zeros_at(sparsity, weights.size) > sum(weights.mask_set.pools[0].most):
        return
    weights.cut(weights.random(0), sparsity, budget)
    assert floor_holds(weights, floor) and int(weights.counts[:, 0].sum()) == zeros_at(sparsity, weights.size)


def test_without_a_floor_budgets_are_as_before():
    shapes = [torch.Size((9, 5)), torch.Size((70, 3)), torch.Size((2, 2))]
    assert layer_zeros("erk", shapes, 0.9) == layer_zeros("erk", shapes, 0.9, [0, 0, 0])


def test_nan_is_refused():
    weights = make_weights(["linear", "attention"], Floor(0.2))
    scores = [torch.rand(shape) for shape in weights.shapes]
    scores[1][5, 3] = torch.nan
    with pytest.raises(FloatingPointError, match="NaN in the scores of 1 attention"):
        weights.mask_set.cut(scores, [3])


def test_the_memory_format_does_not_matter():
    score = torch.randint(0, 3, (4, 6, 3, 3), generator=torch.Generator().manual_seed(0)).float()
    for floor in (Floor(0.3), Floor(0.3, "output")):
        plain, other = (floor.raise_scores(s, Axes()) for s in (score, score.to(memory_format=torch.channels_last)))
        assert torch.equal(plain, other) and other.is_contiguous(memory_format=torch.channels_last)


def attach(method: str | Method, model: nn.Module, **options):
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    goals = {"epochs": EPOCHS, "steps_per_epoch": STEPS, "loss": entropy, "batches": batches(3, seed=7)}
    method = short(method) if isinstance(method, str) else method
    return optimizer, optg.sparsify(model, optimizer, method, **{"sparsity": 0.9, **goals, **options})


@pytest.mark.filterwarnings("ignore:training ended")
@pytest.mark.parametrize("by", ["part", pytest.param("output", marks=pytest.mark.long)])
@pytest.mark.parametrize("name", [name for name, method in METHODS.items() if name not in ("dense", "keep")])
def test_it_holds_after_every_step_of_every_method(name, by):
    torch.manual_seed(0)
    model = convnet()
    floor = Floor(0.05, by)
    method = STR(initial=-1.0) if name == "str" else name  # a threshold that would remove nearly all weights
    optimizer, sparsifier = attach(method, model, floor=0.05, floor_by=by)
    for batch in batches(EPOCHS * STEPS):
        step(model, optimizer, batch)
        assert floor_holds(sparsifier.weights, floor)
    sparsifier.finish()
    if not sparsifier.method.learns_sparsity:
        assert int(sparsifier.weights.counts[:, 0].sum()) == zeros_at(0.9, sparsifier.weights.size)
    if name not in ("set", "rigl", "granet"):  # whose grown weights start at 0
        for mask, value in zip(sparsifier.weights.masks, sparsifier.weights.values):
            assert ((value != 0) == mask).float().mean() > 0.99  # what is kept is not 0


def test_a_collapsed_layer_is_named_and_a_floor_prevents_it():
    torch.manual_seed(0)
    model = convnet()
    model[0].weight.data *= 1e-6
    once = GMP(schedule="constant")
    with pytest.warns(UserWarning, match=r"all 72 weights of 0\.weight .*floor=0\.02"):
        attach(once, copy.deepcopy(model))
    with warnings.catch_warnings(action="error"):
        _, sparsifier = attach(once, model, floor=0.02)
    assert sparsifier.layers()[0].kept == math.ceil(0.02 * 72)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"floor": 0.2},
            r"floor=0.2 protects 387 of 1,928 weights \(that share of each part, rounded up\), but sparsity 0.9 keeps only "
            "192; lower the floor or the sparsity",
        ),
        (
            {"floor": 0.095, "floor_by": "output"},
            r"floor=0.095 protects 194 .* \(that share of each output, rounded up\), but sparsity 0.9 keeps only 192; lower",
        ),
        ({"floor": -0.1}, "floor is -0.1; expected a share"),
        ({"floor": 0.02, "floor_by": "row"}, "floor_by is 'row'; expected 'part' or 'output'"),
        ({"floor": 0.02, "method": "keep", "sparsity": None}, "keep keeps the zeros that the model has; leave out `floor`"),
    ],
)
def test_bad_floors_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        attach(**{"method": "gmp", "model": convnet(), **options})


def test_a_floor_of_exactly_the_kept_share_is_fine():
    weights = make_weights(["linear"], Floor(0.5), target=0.5)
    weights.cut([torch.rand(4, 6)], 0.5)
    assert floor_holds(weights, Floor(0.5))


def test_the_state_knows_the_floor():
    plain, floored = (attach("gmp", convnet(), **options)[1] for options in ({}, {"floor": 0.02}))
    assert "floor" not in plain.state_dict() and floored.state_dict()["floor"] == 0.02
    for source, target, message in (
        (plain, floored, "saved with no floor, here there is a floor"),
        (floored, plain, "saved with a floor, here there is no floor"),
        (attach("gmp", convnet(), floor=0.03)[1], floored, r"saved with floor=0\.03, here it is 0\.02"),
    ):
        with pytest.raises(ValueError, match=message):
            target.load_state_dict(source.state_dict())
    floored.load_state_dict(attach("gmp", convnet(), floor=0.02)[1].state_dict())
