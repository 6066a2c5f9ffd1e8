"""The structure `channel`: whole output channels or neurons, with all weights, biases and norms that are coupled to them.

A unit is a channel of a coupled group (`optg.core.channels`). Its score is the sum of its weights' positive scores, relative to
the average channel of its group. Biases and norms do not count in it, but they are removed with the unit, so that the model can
be shrunk afterwards.

- Only positive scores count, because signed ones cancel. Batch norm ignores the scale of a filter, so g·w sums to 0 over it,
  and so does a score that accumulates g·w.
- Without the comparison within the group, a global cut would take nearly all channels of some layers: the channels of one layer
  have similar magnitudes, those of different layers do not.
- Every group keeps a share of its channels, in case the comparison is not enough.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from optg.core.channels import Group
from optg.core.fixed_point import FixedPoint
from optg.core.floors import Floor
from optg.core.layer_kinds import Axes
from optg.core.pools import Pool
from optg.core.structures import STRUCTURES, Unstructured

LEAST_SHARE = 0.25  # without a floor of the user's, every group keeps this part of the share that stays in the whole network
ONE_UNIT = 1e-12  # a share so small that it is rounded up to one channel


@dataclass(frozen=True, eq=False)
class Slice:
    """The part of a parameter that belongs to the units of a group: unit u owns `index[u]` along `dim`."""

    name: str
    dim: int
    index: Tensor
    ranked: bool  # its scores count; otherwise it is a bias or norm that is removed with the weights
    copies: dict[torch.device, Tensor] = field(default_factory=dict)  # the index on each device

    def on(self, device: torch.device) -> Tensor:
        """Return the index on a device. It is copied once: a CUDA graph may not capture copies from the host."""
        if device not in self.copies:
            self.copies[device] = self.index.to(device)
        return self.copies[device]


class Channels(Unstructured):
    """Whole output channels or neurons. `groups` are found by `optg.core.assignment`."""

    units_are_weights = False
    allows_erk = False  # the groups have no fan-in of their own
    pattern = example = "channel"

    def __init__(self, *numbers: str) -> None:
        super().__init__(*numbers)
        self.groups: list[list[Slice]] = []

    def crosses_rows(self, axes: Axes) -> bool:
        return True


def couple(groups: list[Group], parameters: dict[str, nn.Parameter], wanted: set[str]) -> tuple[Channels, dict[str, str]]:
    """Return the structure of the wanted weights, and why each of the others stays dense.

    A group takes part if all its weights are wanted, and its biases and norms are trained.
    """
    found, reasons = Channels(), dict.fromkeys(wanted, "no coupled channels")
    for group in groups:
        names = {member.name for member in group.sources}
        weights = names & wanted
        followers = {
            name for name in names if name in parameters and parameters[name].ndim < 2 and parameters[name].requires_grad
        }
        reason = group.refusal
        if not reason and (outside := sorted(names - weights - followers)):
            reason = f"channels shared with {outside[0]}, which is not pruned"
        if reason:
            reasons.update({name: reason for name in weights if name in reasons})
        elif weights:
            found.groups.append([Slice(m.name, m.dim, m.index, m.name in wanted) for m in group.sources])
            for name in weights:
                reasons.pop(name, None)
    return found, reasons


class ChannelPool(Pool):
    """The layers of coupled channels. Each group has one tensor of units."""

    structure: Channels

    def describe_units(self) -> None:
        place = {name: i for i, name in enumerate(self.names)}
        self.groups = [[(place[s.name], s) for s in group] for group in self.structure.groups]
        self.unit_names = [group[0][1].name for group in self.groups]
        self.unit_axes = [Axes()] * len(self.groups)
        self.unit_shapes = [torch.Size([len(group[0][1].index)]) for group in self.groups]
        self.shards = None  # every rank has all units
        self.set_floor(None, 1.0)

    def set_floor(self, floor: Floor | None, target: float) -> None:
        if floor:
            floor.refuse(self.unit_names, self.unit_shapes, self.unit_axes, target, None)
        self.floor = floor = floor or Floor(max(LEAST_SHARE * (1 - target), ONE_UNIT))
        self.most = [shape.numel() - floor.kept(shape, axes) for shape, axes in zip(self.unit_shapes, self.unit_axes)]

    def unit_scores(self, scores: Sequence[Tensor]) -> list[Tensor]:
        """Return the sum of each channel's positive scores, relative to the average channel of its group."""
        whole = self.join(scores)
        ranked = [[(layer, s) for layer, s in group if s.ranked] for group in self.groups]
        sizes = [sum(whole[i].numel() // whole[i].shape[s.dim] * s.index.numel() for i, s in group) for group in ranked]
        positive = {i: whole[i].clamp(min=0) for i in sorted({i for group in ranked for i, _ in group})}
        fixed = FixedPoint(list(positive.values()), max(sizes), self.pieces, self.passes)
        # Removed channels of methods that never revive weights, at −∞, rank below all others.
        encoded = {i: fixed.encode(score) - (whole[i] == -math.inf).long() for i, score in positive.items()}
        nan, units = dict(zip(positive, fixed.nan)), []
        for group in ranked:
            parts = [channel_sums(encoded[i], s.dim)[s.on(encoded[i].device)].sum(1) for i, s in group]
            sums = torch.stack([part.to(parts[0].device) for part in parts]).sum(0)
            average = (sums.sum().double() / len(sums)).clamp(min=torch.finfo(torch.float64).tiny)
            odd = torch.stack([nan[i].to(sums.device) for i, _ in group]).any()
            units.append((sums.double() / average).masked_fill_(odd, math.nan))
        return units

    def sample(self, masks: Sequence[Tensor]) -> list[Tensor]:
        whole = self.join(masks)
        kept = []
        for group in self.groups:
            parts = [whole[i].movedim(s.dim, 0)[s.on(whole[i].device)].flatten(1).any(1) for i, s in group if s.ranked]
            kept.append(torch.stack([part.to(parts[0].device) for part in parts]).any(0))
        return kept

    def expand(self, units: Sequence[Tensor], like: Sequence[Tensor]) -> list[Tensor]:
        kept = [torch.ones(shape, dtype=torch.bool, device=t.device) for shape, t in zip(self.shapes, like)]
        return self.split(self.spread(units, kept, True, torch.minimum))

    def ratios(self, latent: Sequence[Tensor], masks: Sequence[Tensor], thresholds: Sequence[Tensor]) -> list[Tensor]:
        units = self.unit_scores([value.abs() for value in latent])
        firsts = [thresholds[group[0][0]] for group in self.groups]
        found = [(t / unit).nan_to_num_(nan=0.0) for t, unit in zip(firsts, units)]
        none = [torch.zeros(shape, dtype=v.dtype, device=v.device) for shape, v in zip(self.shapes, latent)]
        return self.split(self.spread(found, none, 0.0, torch.maximum))

    def spread(
        self, units: Sequence[Tensor], whole: list[Tensor], value: float, combine: Callable[[Tensor, Tensor], Tensor]
    ) -> list[Tensor]:
        """Combine the values of units with tensors that hold one value for all weights."""
        lines = [[t.new_full((length,), value) for length in t.shape] for t in whole]
        for group, values in zip(self.groups, units):
            for i, s in group:
                index = s.on(whole[i].device)
                lines[i][s.dim][index] = values.to(whole[i].device, whole[i].dtype)[:, None].expand(index.shape)
        for i, tensor in enumerate(whole):
            for dim in {s.dim for group in self.groups for layer, s in group if layer == i}:
                whole[i] = combine(whole[i], lines[i][dim].view([-1 if d == dim else 1 for d in range(tensor.ndim)]))
        return whole

    def layer_values(self, values: Tensor) -> Tensor:
        if len(values) == 1:
            return values.expand(len(self.layers))
        first = {i: g for g, group in reversed(list(enumerate(self.groups))) for i, _ in group}
        return values[[first[i] for i in range(len(self.layers))]]


def channel_sums(values: Tensor, dim: int) -> Tensor:
    """Return the sum of the values at each index of a dimension."""
    return values.sum([other for other in range(values.ndim) if other != dim]) if values.ndim > 1 else values


Channels.pool_type = ChannelPool
STRUCTURES.append(Channels)
