"""The optimizer's state of single weights, and snapshots of a model with its optimizer."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from optg.core.prunable import optimizer_parameters, parameters_by_name
from optg.core.sharding import local_piece, to_local

SECOND_WEIGHTS = ("x", "y", "z", "ema")  # where optimizers with two sets of weights keep theirs


def clear_state(optimizer: torch.optim.Optimizer, parameter: nn.Parameter, group_index: int, where: Tensor) -> None:
    """Reset the state (momentum, Adam's moments) of some weights of a parameter, given the index of its parameter group."""
    group = optimizer.param_groups[group_index]
    clean = {"step_size": group["lr"], "sum": group.get("initial_accumulator_value", 0.0)}  # Rprop's and Adagrad's
    for name, state in optimizer.state.get(parameter, {}).items():
        if isinstance(state, Tensor) and state.shape == parameter.shape:
            to_local(state).masked_fill_(where, clean.get(name, 0.0))


def mask_second_weights(optimizer: Any, parameters: Iterable[nn.Parameter], masks: Iterable[Tensor]) -> None:
    """Zero removed weights in the second set that schedule-free optimizers and SPlus keep, which `optimizer.eval()` shows."""
    for p, mask in zip(parameters, masks):
        state = optimizer.state.get(p, {})
        for name in SECOND_WEIGHTS:
            if name in state:
                to_local(state[name]).masked_fill_(~mask, 0.0)


def snapshot(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Copy the model's tensors, without parameters that the optimizer does not train, and the optimizer's state."""
    mine = set(optimizer_parameters(optimizer))
    others = {name for name, p in parameters_by_name(model).items() if p not in mine}
    tensors = {name: t.detach().clone() for name, t in tensors_by_name(model).items() if name not in others}
    states = enumerate(optimizer.state.get(p, {}) for p in optimizer_parameters(optimizer))
    return tensors, {f"{i} {key}": v.clone() for i, state in states for key, v in state.items() if isinstance(v, Tensor)}


def restore(model: nn.Module, optimizer: torch.optim.Optimizer, tensors: dict[str, Tensor], states: dict[str, Tensor]) -> None:
    """Return a model and its optimizer to a snapshot."""
    now = tensors_by_name(model)
    for name, before in tensors.items():
        to_local(now[name]).copy_(local_piece(now[name], before))
    parameters = optimizer_parameters(optimizer)
    for p in parameters:
        optimizer.state.pop(p, None)
    groups = [group for group in optimizer.param_groups if group.get("fused") or group.get("capturable")]
    counted_on_device = {p for group in groups for p in group["params"]}  # these keep their step count on the device
    for key, value in states.items():
        i, name = key.split(" ")
        p = parameters[int(i)]
        device = p.device if value.ndim or p in counted_on_device else torch.device("cpu")
        optimizer.state[p][name] = value.to(device, copy=True)


def tensors_by_name(model: nn.Module) -> dict[str, Tensor]:
    return {name.replace("_orig_mod.", ""): t for name, t in model.state_dict().items() if isinstance(t, Tensor)}
