"""What kind of optimizer is it? Found by trying it."""

import copy

import pytest
import torch
from torch import nn

from optg.core.optimizers import MARK
from optg.core.update_rules import UpdateRule, find_rule

SGD_LIKE, ADAM_LIKE = {"linear": True}, {"linear": False}
RULES = {
    "SGD": SGD_LIKE,
    "ASGD": SGD_LIKE,
    "Adam": ADAM_LIKE | {"decoupled": False},
    "AdamW": ADAM_LIKE | {"decoupled": True},
    "NAdam": ADAM_LIKE | {"decoupled": False},
    "RAdam": ADAM_LIKE | {"decoupled": False},
    "Adamax": ADAM_LIKE | {"decoupled": False},
    "RMSprop": ADAM_LIKE | {"decoupled": False},
    "Adagrad": ADAM_LIKE | {"decoupled": False},
    "Adadelta": ADAM_LIKE | {"decoupled": False},
    "Rprop": ADAM_LIKE,
}


def rule_of(kind, **options):
    p = nn.Parameter(torch.randn(6, 5))
    optimizer = kind([p], lr=0.1, **options)
    return find_rule(optimizer, optimizer.param_groups[0], p.device)


@pytest.mark.parametrize("name", RULES)
def test_every_optimizer_of_torch_is_recognised(name):
    found = rule_of(getattr(torch.optim, name))._asdict()
    assert found | RULES[name] == found


@pytest.mark.parametrize("options", [{"momentum": 0.9, "nesterov": True}, {"weight_decay": 0.1}, {"fused": True}])
def test_sgd_is_linear_with_any_options(options):
    assert rule_of(torch.optim.SGD, **options).linear


def test_muon_is_not_linear():
    if not hasattr(torch.optim, "Muon"):
        pytest.skip("this torch has no Muon")
    assert rule_of(torch.optim.Muon) == UpdateRule(linear=False, decoupled=True)


def test_trying_an_optimizer_leaves_it_and_its_scheduler_alone():
    p = nn.Parameter(torch.ones(3, 3))
    optimizer = torch.optim.Adam([p], lr=torch.tensor(0.0))
    optimizer.defaults[MARK] = True  # as of one that trains a sparse model: a twin must not look like a copy of it
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)  # wraps `optimizer.step`
    optimizer.register_step_post_hook(lambda *_: pytest.fail("the hook ran"))
    p.grad = torch.ones(3, 3)
    before = copy.deepcopy((optimizer.state_dict(), p, torch.get_rng_state()))
    assert find_rule(optimizer, optimizer.param_groups[0], p.device) == UpdateRule()
    assert str(before) == str((optimizer.state_dict(), p, torch.get_rng_state())) and not optimizer.state
    assert not getattr(optimizer, "_opt_called", False) and scheduler.last_epoch == 0


def test_an_optimizer_that_cannot_be_tried_is_not_linear():
    class NeedsClosure(torch.optim.SGD):
        def step(self, closure):
            return closure()

    assert rule_of(NeedsClosure) == UpdateRule()
