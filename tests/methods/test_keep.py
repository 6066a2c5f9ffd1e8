"""`keep` fine-tunes a sparse model with its zeros kept, and other methods say that a model is sparse already."""

import copy
import warnings

import pytest
import torch
from torch import nn

import optg
from tests.methods.test_contract import OPTIMIZERS
from tests.toy import batches, convnet, goal, step


def sparse_model(sparsity: float = 0.9) -> nn.Module:
    torch.manual_seed(0)
    model = convnet()
    goal("keep", model, sparsity)
    return model


def matrices(model: nn.Module) -> list[torch.Tensor]:
    return [p.detach() for p in model.parameters() if p.ndim > 1]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_zeros_stay_and_all_others_train_for_any_number_of_steps(optimizer):
    model = sparse_model()
    before = [p.clone() for p in matrices(model)]
    opt = OPTIMIZERS[optimizer](model.parameters())
    with warnings.catch_warnings(action="error"):
        sparsifier = optg.sparsify(model, opt, method="keep")
        for batch in batches(30):
            step(model, opt, batch)
        sparsifier.finish()
    for old, new in zip(before, matrices(model)):
        assert torch.equal(old == 0, new == 0) and not torch.equal(old, new)
    zeros = sum(int((p == 0).sum()) for p in before)
    assert sparsifier.sparsity == zeros / sum(p.numel() for p in before)
    assert repr(sparsifier) == f"Sparsifier(Keep(ham=0.0, sparse_opt=False), sparsity {sparsifier.sparsity:.4f}, step 30)"


def test_a_layer_of_zeros_is_trained_with_a_warning():
    model = sparse_model()
    nn.init.zeros_(model[7].weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.warns(UserWarning, match=r"all weights of 7\.weight are 0: keep trains all of them"):
        sparsifier = optg.sparsify(model, optimizer, "keep")
    step(model, optimizer, batches(1)[0])
    assert sparsifier.masks["7.weight"].all() and model[7].weight.any() and not sparsifier.masks["4.weight"].all()


def test_a_dense_model_is_trained_dense_with_a_warning():
    model = convnet()
    with pytest.warns(UserWarning, match="the model has no zeros"):
        assert optg.sparsify(model, torch.optim.SGD(model.parameters(), lr=0.1), "keep").sparsity == 0.0


def test_it_takes_no_sparsity_and_no_nan():
    model = sparse_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r"keep keeps the zeros that the model has; leave out sparsity=0\.9"):
        optg.sparsify(model, optimizer, "keep", sparsity=0.9)
    model[4].weight.data[0, 0, 0, 0] = torch.nan
    with pytest.raises(FloatingPointError, match=r"4\.weight holds NaN"):
        optg.sparsify(model, optimizer, "keep")


def test_other_methods_name_what_they_miss():
    model = convnet()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(TypeError, match="optg needs `sparsity=`, the share of weights to remove"):
        optg.sparsify(model, optimizer, steps=10)
    with pytest.raises(ValueError, match="the length of training is not clear"):
        optg.sparsify(model, optimizer, "gmp", sparsity=0.5)


@pytest.mark.parametrize("method", ["gmp", "optg", "rigl", "dense"])
def test_other_methods_say_once_that_a_model_is_sparse_already(method):
    model = sparse_model(0.3)
    nn.init.zeros_(model[0].weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    goals = {"sparsity": 0.0 if method == "dense" else 0.5, "epochs": 2, "steps_per_epoch": 200}
    optg.sparsify(model, optimizer, method, **goals)
    with pytest.warns(UserWarning, match=r"30% of the weights were exactly 0 before training.*method='keep'") as caught:
        for batch in batches(2):
            step(model, optimizer, batch)
    assert len(caught) == 1


@pytest.mark.parametrize("method", ["gmp", "optg", "rigl", "set", "feather", "keep"])
@pytest.mark.filterwarnings("ignore:(RigL|SET) exchanges", "ignore:the model has no zeros")
def test_a_sparse_checkpoint_that_is_loaded_after_sparsify_is_noticed(method):
    """A run that resumes with its model's and its optimizer's state only would begin anew."""
    model = convnet()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    goals = {} if method == "keep" else {"sparsity": 0.5, "steps": 20}
    optg.sparsify(model, optimizer, method, **goals)
    model.load_state_dict(sparse_model(0.9).state_dict())
    with pytest.warns(UserWarning, match=r"\d\d% of the weights were exactly 0 .*load the sparsifier's state") as caught:
        for batch in batches(2):
            step(model, optimizer, batch)
    assert len(caught) == 1


def test_a_few_zeros_or_a_loaded_state_are_no_news():
    model = sparse_model(0.08)
    nn.init.zeros_(model[0].weight)
    goals = {"sparsity": 0.5, "epochs": 2, "steps_per_epoch": 200}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sparsifier = optg.sparsify(model, optimizer, "gmp", **goals)
    with warnings.catch_warnings(action="error"):
        step(model, optimizer, batches(1)[0])
        state = copy.deepcopy(sparsifier.state_dict())
        model = sparse_model(0.3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        optg.sparsify(model, optimizer, "gmp", **goals).load_state_dict(state)
        step(model, optimizer, batches(1)[0])
