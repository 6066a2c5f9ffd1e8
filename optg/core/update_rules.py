"""How an optimizer turns gradients into updates, found by trying it on a small parameter.

A factor on the gradient of SGD is a factor on its update. Adam divides by the gradient's own size, so the factor cancels.
"""

import warnings
from collections import OrderedDict, defaultdict
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

STEPS = 8  # RAdam's first 5 steps are those of SGD
LR, DECAY = 0.5, 0.1


class UpdateRule(NamedTuple):
    linear: bool = False  # a factor on the gradient is the same factor on the update
    decoupled: bool = False  # weight decay is a part of the update that does not depend on the gradient


def find_rule(optimizer: torch.optim.Optimizer, group: dict[str, Any], device: torch.device) -> UpdateRule:
    """Return the rule of one parameter group. An optimizer that cannot be tried counts as not linear."""
    zeros, gradient = torch.zeros(4, 4, device=device), torch.linspace(-1.0, 1.0, 16, device=device).view(4, 4)
    factors = torch.tensor([1.0, 0.5], device=device).repeat(4, 2)
    decaying = group | ({"weight_decay": DECAY} if "weight_decay" in group else {})
    try:
        whole, scaled = (movement(optimizer, group, zeros, g) for g in (gradient, gradient * factors))
        decay = movement(optimizer, decaying, zeros + 1, zeros)
    except Exception:  # it comes from any package, and may need a closure or another shape
        return UpdateRule()
    left = torch.full_like(zeros, (1 - LR * DECAY) ** STEPS)
    return UpdateRule(torch.allclose(scaled, whole * factors, rtol=0.01), torch.allclose(1 + decay, left, rtol=0.01))


def movement(optimizer: torch.optim.Optimizer, group: dict[str, Any], start: Tensor, gradient: Tensor) -> Tensor:
    """Return how far an optimizer with this group's options moves a new parameter in a few steps with the same gradient."""
    p = nn.Parameter(start.clone())
    lr = torch.full_like(group["lr"], LR) if isinstance(group["lr"], Tensor) else LR
    twin = object.__new__(type(optimizer))
    options = group | {"lr": lr}  # as defaults too: the optimizer's own hold a mark that copies are refused by
    own: dict[str, Any] = {"state": defaultdict(dict), "param_groups": [options | {"params": [p]}], "defaults": options}
    own |= {"_optimizer_step_pre_hooks": OrderedDict(), "_optimizer_step_post_hooks": OrderedDict()}
    twin.__dict__ = {k: v for k, v in vars(optimizer).items() if k != "step"} | own  # schedulers wrap `step`
    with warnings.catch_warnings(action="ignore"), torch.no_grad():
        for _ in range(STEPS):
            p.grad = gradient.clone()
            type(optimizer).step(twin)
    return p.detach() - start
