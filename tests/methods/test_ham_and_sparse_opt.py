"""HAM and SparseOpt are options of every method: its promises hold with them too, and they act."""

import copy
import dataclasses
from functools import partial

import pytest
import torch

import optg
from optg.core.ranking import zeros_at
from optg.methods import METHODS
from tests.methods import test_contract as contract
from tests.methods import test_replayed_steps as replayed
from tests.methods.test_contract import EPOCHS, OPTIMIZERS, STEPS
from tests.toy import batches, convnet, entropy, goal, step

OPTIONS = {"ham": 20.0, "sparse_opt": True}
MIDDLE = 11  # between two epochs' cuts


def attach(name, optimizer="sgd", seed=0, **options):
    torch.manual_seed(seed)
    model = convnet()
    opt = OPTIMIZERS[optimizer](model.parameters())
    method = dataclasses.replace(contract.short(name), **options)
    data = {"loss": entropy, "batches": batches(3, seed=7)}
    target = goal(name, model, 0.9)
    return model, opt, optg.sparsify(model, opt, method, epochs=EPOCHS, steps_per_epoch=STEPS, **target, **data)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("name", METHODS)
def test_each_option_changes_what_is_learned(name, option, optimizer):
    finals = []
    for options in ({}, {option: OPTIONS[option]}):
        model, opt, sparsifier = attach(name, optimizer, **options)
        for batch in batches(EPOCHS * STEPS):
            step(model, opt, batch)
        finals.append([v.clone() for v in sparsifier.weights.values])
    same = all(map(torch.equal, *finals))
    # supermask trains no weights; dense networks, and STR's in so short a run, have neurons of equal sparsity
    assert same == (name == "supermask" or (option == "sparse_opt" and name in ("dense", "gsm", "str")))


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", METHODS)
def test_the_model_is_sparse_and_its_weights_effective_after_every_step(name, optimizer):
    model, opt, sparsifier = attach(name, optimizer, **OPTIONS)
    for batch in batches(EPOCHS * STEPS):
        step(model, opt, batch)
        weights = sparsifier.weights
        for layer, (mask, value, latent) in enumerate(zip(weights.masks, weights.values, weights.latent or weights.values)):
            assert torch.equal(value, torch.where(mask, sparsifier.method.effective(weights, layer, latent), 0.0))
            assert value.isfinite().all()
    if not sparsifier.method.learns_sparsity and name != "dense":
        assert sum(int((~m).sum()) for m in sparsifier.masks.values()) == zeros_at(0.9, sparsifier.weights.size)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", METHODS)
def test_resume_is_bit_exact(name, optimizer):
    data = batches(EPOCHS * STEPS)
    model, opt, sparsifier = attach(name, optimizer, **OPTIONS)
    for batch in data[:MIDDLE]:
        step(model, opt, batch)
    saved = copy.deepcopy((model.state_dict(), opt.state_dict(), sparsifier.state_dict()))
    for batch in data[MIDDLE:]:
        step(model, opt, batch)
    expected = contract.training_state(model, opt, sparsifier)
    parts = attach(name, optimizer, seed=1, **OPTIONS)
    model, opt, sparsifier = parts
    for part, value in zip(parts, saved):
        part.load_state_dict(value)
    for batch in data[MIDDLE:]:
        step(model, opt, batch)
    for a, b in zip(contract.training_state(model, opt, sparsifier), expected, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("name", METHODS)
def test_a_step_that_is_interrupted_changes_no_weight(name):
    model, opt, sparsifier = attach(name, **OPTIONS)
    data = batches(EPOCHS * STEPS)
    for batch in data[:13]:
        step(model, opt, batch)
    before = [v.clone() for v in [*sparsifier.weights.values, *(sparsifier.weights.latent or [])]]

    def interrupt(*_):
        raise KeyboardInterrupt

    hook = opt.register_step_pre_hook(interrupt)  # runs after ours
    with pytest.raises(KeyboardInterrupt):
        step(model, opt, data[13])
    hook.remove()
    assert sparsifier.masks
    for now, old in zip([*sparsifier.weights.values, *(sparsifier.weights.latent or [])], before, strict=True):
        assert torch.equal(now, old)


@pytest.mark.filterwarnings("ignore:layer collapse")
@pytest.mark.parametrize("name", ["dense", "optg", "feather", "dpf", "rigl", "acdc", "keep"])
def test_replayed_steps_equal_eager_steps(name, monkeypatch):
    monkeypatch.setattr(replayed, "METHODS", {key: partial(kind, **OPTIONS) for key, kind in METHODS.items()})
    eager, model, _ = replayed.train(name, False, monkeypatch)
    graph, other, count = replayed.train(name, True, monkeypatch)
    assert count > 20 and eager.clock.step == graph.clock.step
    assert all(torch.equal(mask, graph.masks[key]) for key, mask in eager.masks.items())
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), other.parameters()))


def test_after_finish_no_copy_of_the_weights_is_left():
    model, opt, sparsifier = attach("gmp", **OPTIONS)
    for batch in batches(EPOCHS * STEPS):
        step(model, opt, batch)
    assert sparsifier._step.updates.before
    sparsifier.finish()
    assert sparsifier._step.updates is None
