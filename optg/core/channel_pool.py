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
from dataclasses import dataclass
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from optg.core.channels import Group
from optg.core.fixed_point import FixedPoint
from optg.core.floors import Floor
from optg.core.layer_kinds import Axes
from optg.core.passes.units import CHUNK
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


class Index:
    """A tensor of indices, copied to each device once: a CUDA graph may not capture copies from the host."""

    def __init__(self, indices: Tensor) -> None:
        self.indices, self.copies = indices, dict[torch.device, Tensor]()

    def on(self, device: torch.device) -> Tensor:
        if device not in self.copies:
            self.copies[device] = self.indices.to(device)
        return self.copies[device]


class ChannelPool(Pool):
    """The layers of coupled channels. Each group has one tensor of units.

    A *line* has one value for each index along a dimension of a layer. All lines are joined, and so are all units: this takes
    few operations, however many layers there are.
    """

    structure: Channels

    def describe_units(self) -> None:
        place = {name: i for i, name in enumerate(self.names)}
        groups = [[(place[s.name], s) for s in group] for group in self.structure.groups]
        self.unit_names = [group[0][1].name for group in groups]
        self.unit_axes = [Axes()] * len(groups)
        self.counts = [len(group[0][1].index) for group in groups]
        self.unit_shapes = [torch.Size([count]) for count in self.counts]
        self.shards = None  # every rank has all units
        self.set_floor(None, 1.0)

        self.ranked = list(dict.fromkeys((i, s.dim) for group in groups for i, s in group if s.ranked))
        self.lines = list(dict.fromkeys([*self.ranked, *((i, s.dim) for group in groups for i, s in group)]))
        self.lengths = [self.shapes[i][dim] for i, dim in self.lines]
        starts = dict(zip(self.lines, accumulate(self.lengths, initial=0)))

        def members(group: list[tuple[int, Slice]]) -> Tensor:
            """Return where the values of each unit of a group lie in the joined lines."""
            return torch.cat([starts[i, s.dim] + s.index for i, s in group], 1)

        ranked = [[(i, s) for i, s in group if s.ranked] for group in groups]
        weights_in = [sum(math.prod(self.shapes[i]) // self.shapes[i][s.dim] * s.index.numel() for i, s in g) for g in ranked]
        self.most_terms = max(weights_in)
        self.ranked_members = Index(pad([row for group in ranked for row in members(group)]))
        self.members = Index(pad([row for group in groups for row in members(group)]))
        self.units_of_group = Index(pad(torch.arange(sum(self.counts)).split(self.counts)))
        self.group_of_unit = Index(torch.arange(len(groups)).repeat_interleave(torch.tensor(self.counts)))
        self.group_sizes = Index(torch.tensor(self.counts))
        first_group = {i: g for g, group in reversed(list(enumerate(groups))) for i, _ in group}
        self.group_of_layer = Index(torch.tensor([first_group[i] for i in range(len(self.layers))]))
        self.first_layers = [group[0][0] for group in groups]

    def set_floor(self, floor: Floor | None, target: float) -> None:
        if floor:
            floor.refuse(self.unit_names, self.unit_shapes, self.unit_axes, target, None)
        self.floor = floor = floor or Floor(max(LEAST_SHARE * (1 - target), ONE_UNIT))
        self.most = [shape.numel() - floor.kept(shape, axes) for shape, axes in zip(self.unit_shapes, self.unit_axes)]

    def unit_scores(self, scores: Sequence[Tensor]) -> list[Tensor]:
        """Return the sum of each channel's positive scores, relative to the average channel of its group."""
        whole = self.join(scores)
        positive = {i: whole[i].clamp(min=0) for i, _ in self.ranked}
        fixed = FixedPoint(list(positive.values()), self.most_terms, self.pieces, self.passes)
        nan = dict(zip(positive, fixed.nan.long()))
        units = self.sum_units([positive_sums(fixed, positive[i], whole[i], dim) for i, dim in self.ranked])
        odd = self.sum_units([nan[i].expand(length) for (i, _), length in zip(self.ranked, self.lengths)])
        return list(self.relative(units).masked_fill_(odd > 0, math.nan).split(self.counts))

    def sum_units(self, lines: list[Tensor]) -> Tensor:
        """Return the sum of each unit, given the lines whose scores count."""
        joined = torch.cat([line.to(lines[0].device) for line in lines])
        return sum_rows(joined, self.ranked_members.on(joined.device))

    def relative(self, units: Tensor) -> Tensor:
        """Return units divided by the average unit of their group, in float64."""
        home = units.device
        averages = sum_rows(units, self.units_of_group.on(home)).double() / self.group_sizes.on(home)
        return units.double() / averages.clamp(min=torch.finfo(torch.float64).tiny)[self.group_of_unit.on(home)]

    def sample(self, masks: Sequence[Tensor]) -> list[Tensor]:
        whole = self.join(masks)
        kept = self.sum_units([channel_sums(whole[i].long(), dim) for i, dim in self.ranked]) > 0
        return list(kept.split(self.counts))

    def expand(self, units: Sequence[Tensor], like: Sequence[Tensor]) -> list[Tensor]:
        joined = torch.cat([unit.to(units[0].device) for unit in units])
        return self.split(self.spread(joined, True, torch.minimum, self.join(like)))

    def ratios(self, latent: Sequence[Tensor], masks: Sequence[Tensor], thresholds: Sequence[Tensor]) -> list[Tensor]:
        whole = self.join(latent)
        units = self.relative(self.sum_units([channel_norms(whole[i], dim) for i, dim in self.ranked]))
        given = torch.stack([thresholds[i] for i in self.first_layers]).to(units.device)
        ratios = (given[self.group_of_unit.on(units.device)] / units).nan_to_num_(nan=0.0)
        return self.split(self.spread(ratios.to(whole[0].dtype), 0.0, torch.maximum, whole))

    def spread(
        self, units: Tensor, value: float, combine: Callable[[Tensor, Tensor], Tensor], like: Sequence[Tensor]
    ) -> list[Tensor]:
        """Return one value per weight, given one per unit. `value` is for weights of no unit; those of two are combined."""
        joined = units.new_full((sum(self.lengths) + 1,), value)  # the last entry is for the padding
        members = self.members.on(units.device)
        joined[members] = units[:, None].expand(members.shape)
        found: dict[int, Tensor] = {}
        for (i, dim), line in zip(self.lines, joined[:-1].split(self.lengths)):
            line = line.to(like[i].device).view([-1 if d == dim else 1 for d in range(like[i].ndim)])
            found[i] = combine(found[i], line) if i in found else line
        return [torch.empty_like(t, dtype=units.dtype).copy_(found[i]) for i, t in enumerate(like)]

    def layer_values(self, values: Tensor) -> Tensor:
        if len(values) == 1:
            return values.expand(len(self.layers))
        return values[self.group_of_layer.on(values.device)]


def pad(rows: Sequence[Tensor]) -> Tensor:
    """Return a matrix of these rows, filled up with −1."""
    return nn.utils.rnn.pad_sequence(list(rows), batch_first=True, padding_value=-1)


def sum_rows(values: Tensor, indices: Tensor) -> Tensor:
    """Return the sum of the values at each row's indices, always taken in the same order; −1 stands for nothing."""
    return F.pad(values, (0, 1))[indices].sum(1)


def positive_sums(fixed: FixedPoint, positive: Tensor, scores: Tensor, dim: int) -> Tensor:
    """Return the sum of the positive scores at each index of a dimension, as integers. On a CPU, a few indices at a time.

    Removed channels of methods that never revive weights, at −∞, get less than 0: they rank below all others.
    """
    rows = scores.shape[dim]
    if scores.device.type == "cpu":
        rows = max(1, CHUNK * rows // max(1, scores.numel()))
    parts = zip(positive.split(rows, dim), scores.split(rows, dim))
    return torch.cat([channel_sums(fixed.encode(p).sub_((s == -math.inf).long()), dim) for p, s in parts])


def channel_sums(values: Tensor, dim: int) -> Tensor:
    """Return the sum of the values at each index of a dimension."""
    return values.sum([other for other in range(values.ndim) if other != dim]) if values.ndim > 1 else values


def channel_norms(values: Tensor, dim: int) -> Tensor:
    """Return the sum of the magnitudes at each index of a dimension, in float32 or wider."""
    others = [other for other in range(values.ndim) if other != dim]
    return torch.linalg.vector_norm(values, 1, others, dtype=torch.promote_types(values.dtype, torch.float32))


Channels.pool_type = ChannelPool
STRUCTURES.append(Channels)
