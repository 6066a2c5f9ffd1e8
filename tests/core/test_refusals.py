"""Arguments, optimizers and parameters that `sparsify` refuses."""

import copy

import pytest
import torch
from torch import nn

from optg.methods import OptG
from tests.toy import attach, convnet, is_unchanged


@pytest.mark.parametrize(
    "options, error, message",
    [
        ({"sparsity": 1.0}, ValueError, "sparsity is 1.0; expected the share of weights to remove, at least 0 and below 1"),
        ({"sparsity": -0.1}, ValueError, "sparsity is -0.1"),
        ({"sparsity": 95}, ValueError, "expected the share of weights to remove, at least 0 and below 1. For 95 %, write 0.95"),
        ({"sparsity": float("nan")}, ValueError, "sparsity is nan"),
        ({"sparsity": "0.9"}, ValueError, "sparsity is '0.9'; expected the share of weights"),
        ({"exclude": None}, TypeError, "None is not a pattern; expected a module class or the name of a layer"),
        ({"include": [nn.ReLU()]}, TypeError, "ReLU() is not a pattern"),
        ({"method": "optgg"}, ValueError, "unknown method 'optgg'; did you mean 'optg'? Known: dense, snip, grasp,"),
        ({"method": "dense"}, ValueError, "dense training removes nothing; sparsity is 0.9, expected 0"),
        ({"include": "features.*"}, ValueError, "the pattern 'features.*' matches no prunable weight"),
        ({"exclude": "0.bias"}, ValueError, "biases, norms and frozen parameters are never pruned"),
        ({"exclude": "*"}, ValueError, "the model has no prunable weight"),
        ({"method": None}, TypeError, "method is None; expected the name or an instance of a method"),
        ({"method": OptG}, TypeError, "expected the name or an instance of a method"),
    ],
)
def test_bad_arguments_are_refused_and_change_nothing(options, error, message):
    model = convnet()
    before = copy.deepcopy(model.state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(error) as caught:
        attach(model, optimizer, **options)
    assert message in str(caught.value)
    assert is_unchanged(model, before) and not optimizer._optimizer_step_pre_hooks
    attach(model, optimizer)  # valid arguments still work


def test_weights_that_the_optimizer_does_not_train_are_named():
    model = convnet()
    with pytest.raises(ValueError, match=r"the optimizer does not own 4\.weight, 7\.weight: give it these parameters, freeze"):
        attach(model, torch.optim.SGD(model[0].parameters(), lr=0.1))
    attach(model, torch.optim.SGD(model[0].parameters(), lr=0.1), exclude=["4", "7"])


def test_lbfgs_and_sparse_adam_are_refused_with_the_reason():
    model = convnet()
    with pytest.raises(TypeError, match="LBFGS cannot train a sparse model: it evaluates the model many times inside one step"):
        attach(model, torch.optim.LBFGS(model.parameters()))
    with pytest.raises(TypeError, match="SparseAdam cannot train a sparse model: it accepts sparse gradients only"):
        attach(model, torch.optim.SparseAdam(model.parameters()))


def test_an_optimizer_whose_step_runs_no_hooks_is_refused():
    class Wrapper(torch.optim.Optimizer):
        def __init__(self, inner):
            self.__dict__.update(inner.__dict__)  # without Optimizer.__init__, torch never adds the hooks to `step`

        def step(self):
            pass

    model = convnet()
    with pytest.raises(TypeError, match="Wrapper cannot train a sparse model: its step never runs step hooks"):
        attach(model, Wrapper(torch.optim.SGD(model.parameters(), lr=0.1)))


def test_a_learning_rate_of_none_is_refused():
    model = convnet()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.param_groups[0]["lr"] = None
    with pytest.raises(ValueError, match="a parameter group of SGD has no 'lr'"):
        attach(model, optimizer)


@pytest.mark.parametrize("method", ["optg", "supermask", "str", "gmp", "rigl"])
def test_maximize_is_refused_by_methods_that_learn_from_the_gradient(method):
    model = convnet()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, maximize=True)
    if method in ("optg", "supermask", "str"):
        with pytest.raises(ValueError, match=r"maximize=True\. Minimize the negative instead"):
            attach(model, optimizer, method)
    else:
        attach(model, optimizer, method)
