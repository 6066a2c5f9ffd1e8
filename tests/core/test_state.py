"""Saving and loading a sparsifier's state. tests/methods/test_contract.py checks that every method resumes bit for bit."""

import copy

import pytest
import torch

import optg
from tests.toy import attach, batches, convnet, is_unchanged, mlp, sgd, step


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def test_state_of_a_compiled_model_loads_into_a_plain_one():
    model = convnet()
    optimizer, sparsifier = attach(torch.compile(model, backend="eager"))
    for batch in batches(13):
        step(model, optimizer, batch)
    bare = convnet()
    _, other = attach(bare)
    bare.load_state_dict(model.state_dict())
    other.load_state_dict(copy.deepcopy(sparsifier.state_dict()))
    assert list(other.masks) == ["0.weight", "4.weight", "7.weight"]
    assert all(torch.equal(a, b) for a, b in zip(other.masks.values(), sparsifier.masks.values()))
    assert other.weights.counts.tolist() == sparsifier.weights.counts.tolist()


def finished_state():
    _, sparsifier = attach(convnet())
    with pytest.warns(UserWarning, match="training ended at sparsity"):
        sparsifier.finish()
    return sparsifier.state_dict()


def test_a_state_that_does_not_fit_is_refused_and_changes_nothing():
    model, other = convnet(), mlp()
    optimizer, sparsifier = attach(model)
    for batch in batches(13):
        step(model, optimizer, batch)
    before = copy.deepcopy((model.state_dict(), sparsifier.state_dict()))
    wrong_shape = copy.deepcopy(sparsifier.state_dict())
    wrong_shape["tensors"]["latent"]["7.weight"] = torch.zeros(3, 3)
    states = {
        r"belongs to another model: only this model has 0\.weight \(masks\)": attach(other)[1].state_dict(),
        r"7\.weight \(latent\) has the shape \(3, 3\) in the state, \(10, 128\) here": wrong_shape,
        r"saved with method='gmp', here it is 'optg'": attach(convnet(), method="gmp")[1].state_dict(),
        r"saved with sparsity=0\.5, here it is 0\.9": attach(convnet(), sparsity=0.5)[1].state_dict(),
        r"in a run of 10 steps \(2 epochs\), this run has 20 steps \(4 epochs\); .* To train longer, .*'keep'": attach(
            convnet(), epochs=2
        )[1].state_dict(),
        r"this is not a sparsifier state: it has no 'method'": model.state_dict(),
        r"the state has no scores: it was saved after finish\(\)": finished_state(),
    }
    for message, state in states.items():
        with pytest.raises(ValueError, match=message):
            sparsifier.load_state_dict(state)
    assert is_unchanged(model, before[0])
    after = sparsifier.state_dict()
    assert after["step"] == 13
    for kind, layers in before[1]["tensors"].items():
        assert all(torch.equal(t, after["tensors"][kind][n]) for n, t in layers.items())


def test_a_length_may_be_given_in_steps_or_in_epochs():
    model = convnet()
    optimizer, sparsifier = attach(model, epochs=5, steps=4)
    for batch in batches(13):
        step(model, optimizer, batch)
    by_steps = optg.sparsify(other := convnet(), sgd(other.parameters()), sparsity=0.9, epochs=5, steps=20)
    by_steps.load_state_dict(sparsifier.state_dict())
    assert by_steps.clock.step == 13
    sparsifier.load_state_dict(by_steps.state_dict())
    longer = optg.sparsify(third := convnet(), sgd(third.parameters()), sparsity=0.9, steps=30)
    with pytest.raises(ValueError, match=r"saved in a run of 20 steps \(5 epochs\), this run has 30 steps \(30 epochs\)"):
        longer.load_state_dict(sparsifier.state_dict())
