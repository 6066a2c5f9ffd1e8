"""Coupled channels: channels of several layers that can only be removed together."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from optg.core.channels.kinds import Port, Slot, kind_of, slot
from optg.core.channels.trace import Link

ONE_UNIT = "it has only one unit, and one must stay"


@dataclass(frozen=True, eq=False)
class Member:
    """The slices of one parameter or buffer that belong to the units of a group."""

    name: str  # name of the parameter or buffer
    dim: int
    index: Tensor  # row u lists the positions along `dim` that unit u owns
    source: bool  # zeroed when a unit is removed? weights, biases and norms are; inputs of later layers are not


@dataclass(frozen=True, eq=False)
class Group:
    """Units that may each be removed from all members at once. A unit is a channel, or several that depend on each other."""

    members: tuple[Member, ...]
    refusal: str = ""  # why no unit may be removed; empty if units may be

    @property
    def size(self) -> int:
        """The number of units."""
        return len(self.members[0].index)

    @property
    def removable(self) -> bool:
        return not self.refusal

    @property
    def sources(self) -> list[Member]:
        """The members that are zeroed when a unit is removed."""
        return [member for member in self.members if member.source]


Removals = Sequence[tuple[Group, Tensor]]  # groups, and which of their units to remove


def tensors_by_name(model: nn.Module) -> dict[str, Tensor]:
    """Return each parameter and buffer once."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def make_groups(model: nn.Module, links: Iterable[Link]) -> list[Group]:
    """Merge linked channels into units, and units with the same members into groups, in the order of the parameters."""
    names = {tensor: name for name, tensor in tensors_by_name(model).items()}
    starts: dict[tuple[str, int], int] = {}  # every position along every dimension of every tensor gets a number
    total = 0
    for tensor, name in names.items():
        for dim, length in enumerate(tensor.shape):
            starts[name, dim] = total
            total += length
    sources: dict[tuple[str, int], bool] = defaultdict(bool)  # whether a linked dimension of a tensor is a source
    edges, refused = [torch.empty(0, 2, dtype=torch.int64)], list[tuple[Tensor, str]]()
    for link in links:
        own, other = slots_of(link.layer, "output", 0), slots_of(link.other, link.port, link.dim)
        anchors = own[0].index[:, 0] + starts[names[own[0].tensor], own[0].dim]
        refused.append((anchors[link.pairs[:, 0]], link.refusal))
        for column, each in [*((0, each) for each in own), *((1, each) for each in other)]:
            key = (names[each.tensor], each.dim)
            sources[key] |= each.source
            pairs = link.pairs[link.pairs[:, column] < len(each.index)]
            ends = each.index[pairs[:, column]] + starts[key]
            edges.append(torch.stack([anchors[pairs[:, :1]].expand_as(ends), ends], -1).view(-1, 2))
    labels = components(total, torch.cat(edges).numpy())
    lengths = {name: tensor.shape for tensor, name in names.items()}
    linked = {key: labels[start : start + lengths[key[0]][key[1]]] for key, start in starts.items() if key in sources}
    refusals = {unit: refusal for units, refusal in refused if refusal for unit in labels[units.numpy()].tolist()}
    return group_units(linked, sources, refusals)


def slots_of(layer: nn.Module | nn.Parameter, port: Port, dim: int) -> list[Slot]:
    """Return the slots of a layer's input or output channels. The channels of a bare parameter lie along `dim`."""
    if isinstance(layer, nn.Parameter):
        return list(slot(layer, dim % layer.ndim, True))
    kind = kind_of(layer)
    return list(kind.slots(layer, port)) if kind else []


def components(total: int, edges: np.ndarray) -> np.ndarray:
    """Return for each of `total` numbers the smallest number that edges connect it to."""
    labels, (a, b) = np.arange(total), edges.T
    while True:
        low = np.minimum(labels[a], labels[b])
        merged = labels.copy()
        np.minimum.at(merged, a, low)
        np.minimum.at(merged, b, low)
        merged = merged[merged]
        if (merged == labels).all():
            return labels
        labels = merged


def group_units(
    linked: dict[tuple[str, int], np.ndarray], sources: dict[tuple[str, int], bool], refusals: dict[int, str]
) -> list[Group]:
    """Group the units that own equally many positions of the same tensors. Units without a source are left out."""
    owned: dict[int, list[tuple[str, int, int]]] = defaultdict(list)
    for (name, dim), labels in linked.items():
        for unit, count in Counter(labels.tolist()).items():
            owned[unit].append((name, dim, count))
    groups: dict[tuple[str, tuple[tuple[str, int, int], ...]], list[int]] = defaultdict(list)
    for unit in sorted(owned):
        if any(sources[name, dim] for name, dim, _ in owned[unit]):
            groups[refusals.get(unit, ""), tuple(owned[unit])].append(unit)
    found = []
    for (refusal, keys), units in groups.items():
        members = [Member(name, dim, positions(linked[name, dim], units), sources[name, dim]) for name, dim, _ in keys]
        found.append(Group(tuple(members), refusal or (ONE_UNIT if len(units) == 1 else "")))
    return found


def positions(labels: np.ndarray, units: Sequence[int]) -> Tensor:
    """Return the positions of each unit, in rows."""
    order = np.argsort(labels, kind="stable")
    order = order[np.isin(labels[order], units)]
    return torch.from_numpy(order).view(len(units), -1)


def zeroed_tensors(model: nn.Module, removals: Removals) -> dict[str, Tensor]:
    """Return copies of the parameters that are sources of these units, with the units zeroed."""
    tensors, zeroed = tensors_by_name(model), dict[str, Tensor]()
    for group, units in removals:
        for member in group.sources:
            tensor = zeroed.setdefault(member.name, tensors[member.name].detach().clone())
            tensor.index_fill_(member.dim, member.index[units].flatten().to(tensor.device), 0)
    return zeroed


def remove_units(model: nn.Module, removals: Removals) -> None:
    """Take units out of all members of their groups, and correct the attributes of the layers."""
    keep: dict[tuple[str, int], Tensor] = {}
    tensors = tensors_by_name(model)
    for group, units in removals:
        for member in group.members:
            key = (member.name, member.dim)
            keep.setdefault(key, torch.ones(tensors[member.name].shape[member.dim], dtype=torch.bool))
            keep[key][member.index[units].flatten()] = False
    smaller: dict[Tensor, Tensor] = {}
    for (name, dim), kept in keep.items():
        old = tensors[name]
        new = smaller.get(old, old.detach()).index_select(dim, kept.nonzero().flatten().to(old.device))
        smaller[old] = nn.Parameter(like(old, new), old.requires_grad) if isinstance(old, nn.Parameter) else new
    for module in model.modules():
        stores: list[dict[str, Any]] = [module._parameters, module._buffers]
        changed = [(store, key, t) for store in stores for key, t in store.items() if t is not None and t in smaller]
        for store, place, tensor in changed:
            store[place] = smaller[tensor]
        if changed and (kind := kind_of(module)) is not None:
            kind.resize(module)


def like(old: Tensor, new: Tensor) -> Tensor:
    """Return the new tensor in the memory format of the old one."""
    channels_last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(old.ndim)
    if channels_last is None or old.is_contiguous() or not old.is_contiguous(memory_format=channels_last):
        return new
    return new.contiguous(memory_format=channels_last)
