"""Several optimizers with one budget, wrapped optimizers, and optimizers that are refused."""

import pytest
import torch
from torch import nn

import optg
from optg.methods import METHODS
from tests.toy import batches, convnet, entropy, goal, step

TOTAL = 24


def sgd(parameters, lr=0.05):
    return torch.optim.SGD(parameters, lr=lr, momentum=0.9, weight_decay=1e-3)


def short(name):
    options = {"every": 3} if hasattr(METHODS[name], "every") else {"fraction": 0.6} if name == "imp" else {}
    return METHODS[name](**options)


def attach(name, optimizers, model):
    return optg.sparsify(
        model, optimizers, short(name), steps=TOTAL, loss=entropy, batches=batches(4), **goal(name, model, 0.9)
    )


@pytest.mark.parametrize("name", [name for name in METHODS if name != "dense" and not METHODS[name].needs_all_gradients])
def test_two_equal_optimizers_train_like_one(name):
    """Splitting the parameters over two optimizers with the same settings changes nothing, bit for bit."""
    results = []
    for several in (False, True):
        torch.manual_seed(0)
        model = convnet()
        parameters = list(model.parameters())
        optimizers = [sgd(parameters[:3]), sgd(parameters[3:])] if several else [sgd(parameters)]
        sparsifier = attach(name, optimizers, model)
        for batch in batches(TOTAL):
            for optimizer in optimizers:
                optimizer.zero_grad()
            entropy(model, batch).backward()
            for optimizer in optimizers:
                optimizer.step()
        assert sparsifier.clock.step == TOTAL
        sparsifier.finish()
        results.append((dict(model.named_parameters()), sparsifier.masks))
    (one, masks), (two, other_masks) = results
    for key, mask in masks.items():
        assert torch.equal(mask, other_masks[key]), key
    for key, p in one.items():
        assert torch.equal(p, two[key]), key


@pytest.mark.parametrize("name", ["gsm", "taylor", "granet"])
def test_methods_that_need_all_gradients_refuse_several_optimizers(name):
    model = convnet()
    parameters = list(model.parameters())
    with pytest.raises(ValueError, match=f"{name} uses the gradients of all weights at once"):
        attach(name, [sgd(parameters[:3]), sgd(parameters[3:])], model)


def test_a_round_ends_when_one_optimizer_steps_again():
    model = convnet()
    parameters = list(model.parameters())
    first, second = sgd(parameters[:3]), sgd(parameters[3:])
    sparsifier = attach("gmp", [first, second], model)
    steps = []
    for optimizer in (first, first, second, first, second, second):
        entropy(model, batches(1)[0]).backward()
        optimizer.step()
        steps.append(sparsifier.clock.step)
        assert sparsifier.verify().ok
    assert steps == [0, 1, 2, 2, 3, 3]  # rounds: first | first, second | first, second | second …


def test_scores_follow_relative_learning_rates_if_the_initial_ones_differ():
    model = convnet()
    parameters = list(model.parameters())
    muon, adamw = sgd(parameters[:3], lr=0.2), torch.optim.AdamW(parameters[3:], lr=1e-3)
    sparsifier = attach("optg", [muon, adamw], model)
    assert [float(lr) for lr in sparsifier.weights.learning_rates()] == [1.0, 1.0, 1.0]
    muon.param_groups[0]["lr"] = 0.1
    assert [float(lr) for lr in sparsifier.weights.learning_rates()] == pytest.approx([0.5, 1.0, 1.0])


class Wrapper:
    """What accelerate, opacus and fastai do: another object around the optimizer, which calls its step."""

    def __init__(self, attribute, optimizer):
        setattr(self, attribute, optimizer)


@pytest.mark.parametrize("attribute", ["optimizer", "original_optimizer", "opt"])
def test_wrapped_optimizers_are_unwrapped(attribute):
    model = convnet()
    optimizer = sgd(model.parameters())
    sparsifier = attach("gmp", Wrapper(attribute, Wrapper("optimizer", optimizer)), model)
    for batch in batches(TOTAL):
        step(model, optimizer, batch)
    assert sparsifier.optimizer is optimizer and sparsifier.sparsity == pytest.approx(0.9, abs=1e-3)


def test_what_is_no_optimizer_is_refused():
    with pytest.raises(TypeError, match="object is not a torch optimizer: it has no step hooks; expected a torch"):
        attach("gmp", object(), convnet())
    with pytest.raises(ValueError, match="there is no optimizer"):
        attach("gmp", [], convnet())
    model = convnet()
    optimizer = sgd(model.parameters())
    with pytest.raises(ValueError, match="listed twice"):
        attach("gmp", [optimizer, optimizer], model)


class AdamWScheduleFree(torch.optim.SGD):
    pass


class AdaptiveSAM(torch.optim.SGD):
    """SAM has relatives in many packages, by many names."""

    first_step = second_step = torch.optim.SGD.step


class SophiaH(torch.optim.SGD):
    pass


@pytest.mark.parametrize(
    ("kind", "method", "message"),
    [
        (AdamWScheduleFree, "optg", "AdamWScheduleFree cannot train a sparse model with OptG: it keeps two sets of weights"),
        (AdamWScheduleFree, "gmp", "Use method='rigl' or 'set'"),
        (AdaptiveSAM, "optg", "AdaptiveSAM cannot train a sparse model: its first_step and second_step bypass"),
        (SophiaH, "optg", "SophiaH cannot train a sparse model: it needs a second backward pass"),
    ],
)
def test_optimizers_that_cannot_work_are_refused_by_name(kind, method, message):
    model = convnet()
    with pytest.raises(TypeError, match=message):
        attach(method, kind(model.parameters(), lr=0.1), model)


def test_schedule_free_optimizers_work_with_methods_that_are_sparse_from_the_start():
    model = convnet()
    attach("rigl", AdamWScheduleFree(model.parameters(), lr=0.1), model)


def test_an_optimizer_without_a_learning_rate_is_refused():
    model = convnet()
    optimizer = sgd(model.parameters())
    del optimizer.param_groups[0]["lr"]
    with pytest.raises(ValueError, match="a parameter group of SGD has no 'lr'"):
        attach("optg", optimizer, model)


def test_fsdp1_is_refused_with_the_way_out():
    class FullyShardedDataParallel(nn.Sequential):
        pass

    model = FullyShardedDataParallel(nn.Linear(3, 3))
    with pytest.raises(TypeError, match="Use FSDP2"):
        attach("optg", sgd(model.parameters()), model)
