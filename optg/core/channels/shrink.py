"""optg.shrink: remove channels that are zero from all layers that they run through.

small = optg.shrink(model, example)
small(x)                                     # like model.eval()(x)
"""

import math
import warnings
from typing import Any

import torch
from torch import Tensor, nn

from optg.core.channels.find import copy_of, coupled_channels
from optg.core.channels.groups import Group, remove_units, tensors_by_name


def shrink(model: nn.Module, example: Any, *, multiple: int = 1) -> nn.Module:
    """Return a smaller copy of the model, without its zero channels, that computes the same.

    A channel is removed if everything that produces it is 0: weights, biases and the norms behind them, in all coupled layers
    (those added in a residual sum, for example). The zeros may come from any source. One channel of each group stays, even
    if all are 0. The model itself does not change. Needs torch-pruning: pip install 'optg[shrink]'.

    Args:
        example: what the model is called with: a tensor, a tuple of tensors, or a dict of named ones. One example is enough.
        multiple: layers that lose channels keep a multiple of this many, so the first few zero channels may stay. GPUs'
            tensor cores are faster with multiples of 8 in 16-bit types.
    """
    if multiple < 1:
        raise ValueError(f"multiple is {multiple}; expected at least 1")
    groups = [group for group in coupled_channels(model, example) if group.removable]
    small = copy_of(model)
    dead = {group: dead_units(small, group) for group in groups}
    if whole := [group for group in groups if len(dead[group]) == group.size]:
        named = ", ".join(group.sources[0].name for group in whole[:3])
        warnings.warn(f"all channels of {named} are 0; at least one of each stays", stacklevel=2)
    removals = [(group, dead[group][dead_units_to_keep(group, len(dead[group]), multiple) :]) for group in groups]
    if not any(len(units) for _, units in removals):
        few = f", or too few to leave a multiple of {multiple}" if multiple > 1 else ""
        warnings.warn(f"no channel is 0 in all its coupled layers{few}: the model keeps its size", stacklevel=2)
    remove_units(small, removals)
    return small


def dead_units(model: nn.Module, group: Group) -> Tensor:
    """Return the units whose sources are all 0."""
    tensors, alive = tensors_by_name(model), torch.zeros(group.size, dtype=torch.bool)
    for member in group.sources:
        tensor = tensors[member.name].detach()
        nonzero = (tensor.movedim(member.dim, 0).flatten(1) != 0).any(1) if tensor.ndim > 1 else tensor != 0
        alive |= nonzero.cpu()[member.index].any(1)
    return (~alive).nonzero().flatten()


def dead_units_to_keep(group: Group, dead: int, multiple: int) -> int:
    """Return how many dead units must stay, so that each layer keeps a multiple of this many of the group's channels.

    A unit may own several channels of a layer. If the next multiple is larger than the group, the whole group stays.
    """
    step = multiple // math.gcd(multiple, *(member.index.shape[1] for member in group.members))
    alive = group.size - dead
    return min(math.ceil(max(alive, 1) / step) * step, group.size) - alive
