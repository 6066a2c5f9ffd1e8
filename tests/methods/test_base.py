"""What gradual methods share: their options, and every combination of a method with a budget or a schedule."""

import warnings

import pytest
import torch

from optg.core.schedules import SCHEDULES
from optg.core.weights import SparseWeights
from optg.methods import ACDC, DPF, GMP, METHODS, SNIP, Feather, Gradual, GraNet, OptG, RigL, Taylor, current_options
from tests.toy import batches, entropy, magnitude_zeros, smallest, sparse_convnet, step

EPOCHS, STEPS = 5, 4
SIZES = [72, 576, 1280]  # of the convnet's layers: 1,928 weights, of which ⌈0.9 · 1928⌉ = 1,736 are removed and 192 kept


@pytest.mark.parametrize(
    "method, field, value",
    [
        (GMP, "schedule", "cubik"), (GMP, "budget", "erc"), (GMP, "end", 1.5), (GMP, "every", 0), (GMP, "start", 0.9),
        (GMP, "every", "0 epochs"), (GMP, "every", "5 steps"), (GMP, "every", None), (GraNet, "initial", 1.0),
        (OptG, "alpha", 0.0), (OptG, "alpha", -1.0), (RigL, "fraction", 1.5), (RigL, "fraction", -0.5), (Feather, "power", 0.0),
        (ACDC, "start", 1.5), (ACDC, "phase", -1.0), (ACDC, "final", 2.0),
    ],
)  # fmt: skip
def test_bad_method_options_are_refused(method, field, value):
    with pytest.raises(ValueError, match=field):
        method(**{field: value})


@pytest.mark.parametrize(
    ("name", "saved", "now"),
    [
        ("gmp", {"every": 100, "every_epochs": 5, "alpha": None, "initial": 0.0}, {"every": 100}),
        ("gmp", {"every": "none", "every_epochs": 5}, {"every": "5 epochs"}),
        ("gmp", {"every": None, "every_epochs": 1}, {"every": "epoch"}),
        ("gmp", {"initial": 0.3, "alpha": "none"}, {"initial": 0.3}),  # it had an effect, so it stays and is refused
        ("optg", {"every_epochs": 5, "alpha": None}, {"every": "5 epochs", "alpha": None}),
        ("granet", {"initial": 0.0, "alpha": 1.0}, {"initial": 0.0, "alpha": 1.0}),
        ("str", {"initial": 0.0}, {"initial": 0.0}),
    ],
)
def test_options_of_earlier_versions_are_read(name, saved, now):
    assert current_options(name, saved) == now


def test_states_with_options_of_earlier_versions_can_be_loaded():
    *_, sparsifier = sparsify_convnet(GMP(every="2 epochs"))
    state = sparsifier.state_dict()
    state["options"] |= {"every": None, "every_epochs": 2, "alpha": None, "initial": 0.0}
    sparsifier.load_state_dict(state)
    state["options"]["initial"] = 0.3
    with pytest.raises(ValueError, match=r"saved with options=.*'initial': 0.3"):
        sparsifier.load_state_dict(state)


@pytest.mark.parametrize("every", ["epoch", "2 epochs"])
def test_a_time_between_cuts_in_epochs_equals_the_same_time_in_steps(every):
    runs = []
    for period in (every, STEPS if every == "epoch" else 2 * STEPS):
        model, optimizer, sparsifier = sparsify_convnet(GMP(every=period))
        zeros = []
        for batch in batches(EPOCHS * STEPS):
            step(model, optimizer, batch)
            zeros.append(sparsifier.weights.counts[:, 0].tolist())
        runs.append(zeros)
    assert runs[0] == runs[1] and len({tuple(z) for z in runs[0]}) > 1


def sparsify_convnet(method):
    data = {"loss": entropy, "batches": batches(2, seed=7)}
    return sparse_convnet(method, epochs=EPOCHS, steps=STEPS, **data)


# ---- budgets with methods

ZEROS_AT_90 = {
    # each layer keeps 192 / 1928 of its weights: 7.17, 57.36 and 127.47
    "uniform": [72 - 7, 576 - 57, 1280 - 128],
    # 192 are kept as 8+1+3+3 : 8+8+3+3 : 10+128, that is 16.46, 24.14 and 151.41
    "erk": [72 - 17, 576 - 24, 1280 - 151],
}


@pytest.mark.parametrize("budget", ["global", "uniform", "erk", "magnitude"])
@pytest.mark.parametrize("method", [OptG, GMP, Taylor, DPF, SNIP], ids=lambda m: m.__name__)
@pytest.mark.filterwarnings("ignore:layer collapse")
def test_the_total_is_exact_and_each_layer_meets_its_budget(method, budget, monkeypatch):
    cuts, real_cut = [], SparseWeights.cut

    def watch(self, scores, sparsity, budget):
        values, scores = [v.clone() for v in self.values], [s.clone() for s in scores]
        thresholds = real_cut(self, scores, sparsity, budget)
        cuts.append((values, scores, [m.clone() for m in self.masks]))
        return thresholds

    monkeypatch.setattr(SparseWeights, "cut", watch)
    model, optimizer, sparsifier = sparsify_convnet(method(budget=budget) if method is SNIP else method(budget=budget, every=3))
    for batch in batches(EPOCHS * STEPS):
        step(model, optimizer, batch)
    assert len(cuts) == {OptG: 6, GMP: 5, Taylor: 5, DPF: 6, SNIP: 1}[method]
    values, scores, masks = cuts[-1]
    zeros = [int((~m).sum()) for m in sparsifier.masks.values()]
    assert zeros == [int((v == 0).sum()) for v in sparsifier.weights.values] and sum(zeros) == 1736
    if budget == "global":
        expected = smallest(torch.cat([s.flatten() for s in scores]), 1736).split(SIZES)
    else:
        assert zeros == (magnitude_zeros(values, 1736) if budget == "magnitude" else ZEROS_AT_90[budget])
        expected = [smallest(s.flatten(), z) for s, z in zip(scores, zeros)]
    for mask, now, removed in zip(masks, sparsifier.masks.values(), expected, strict=True):
        assert torch.equal(now, mask) and torch.equal(~mask.flatten(), removed)


@pytest.mark.filterwarnings("ignore:layer collapse")
def test_budgets_differ():
    """Otherwise the test above could not tell them apart."""
    found = {}
    for budget in ("global", "uniform", "erk", "magnitude"):
        _, _, sparsifier = sparsify_convnet(SNIP(budget=budget))
        found[budget] = tuple(int((~m).sum()) for m in sparsifier.masks.values())
    assert len(set(found.values())) == 4


# ---- schedules with methods

GRADUAL = [name for name, method in METHODS.items() if issubclass(method, Gradual)]


def test_gradual_methods_are_found_in_the_registry():
    assert {"taylor", "gmp", "set", "rigl", "granet", "dpf", "dnw", "supermask", "optg", "st3", "feather"} <= set(GRADUAL)


@pytest.mark.parametrize("schedule", [*SCHEDULES, None])  # None: the method's own schedule and period, which may exceed the run
@pytest.mark.parametrize("name", GRADUAL)
@pytest.mark.filterwarnings("ignore:layer collapse")
def test_every_schedule_ends_exactly_at_the_target(name, schedule):
    model, optimizer, sparsifier = sparsify_convnet(METHODS[name](schedule=schedule, every=2) if schedule else METHODS[name]())
    zeros = [int(sparsifier.weights.counts[:, 0].sum())]
    for batch in batches(EPOCHS * STEPS):
        step(model, optimizer, batch)
        zeros.append(int(sparsifier.weights.counts[:, 0].sum()))
    assert zeros == sorted(zeros) and zeros[-1] == sum(int((~m).sum()) for m in sparsifier.masks.values()) == 1736
    assert sum(int((v == 0).sum()) for v in sparsifier.weights.values) >= 1736  # grown weights start at 0
    with warnings.catch_warnings(action="error"):
        sparsifier.finish()
