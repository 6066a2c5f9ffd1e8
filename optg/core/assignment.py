"""Which structure each layer gets, which layers stay dense because of it, and the sparsity that follows from it."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from optg.core.channel_pool import Channels, couple
from optg.core.channels import Group, coupled_channels
from optg.core.layer_kinds import Axes
from optg.core.prunable import Pattern, as_patterns, find_axes, find_owners, matches_weight, parameters_by_name
from optg.core.sharding import is_dtensor
from optg.core.structures import NM, STRUCTURES, Unstructured

StructureLike = str | Mapping[Pattern, str]


@dataclass
class Assignment:
    """The weights to prune, the structure of each, and the prunable layers that stay dense."""

    parameters: dict[str, nn.Parameter]
    axes: list[Axes]
    structures: list[Unstructured]
    label: str = "unstructured"  # as `structure=` takes it
    dense: dict[str, str] = field(default_factory=dict)  # name -> reason
    followers: set[str] = field(default_factory=set)  # biases and norms that are removed with channels; they are not counted
    example: Any = None  # the input that channels were found with, if it is known

    @property
    def notes(self) -> list[str]:
        """Say which layers stay dense, one line per reason."""
        reasons: dict[str, list[str]] = {}
        for name, reason in self.dense.items():
            reasons.setdefault(reason, []).append(name)
        return [f"dense ({reason}): {', '.join(names)}" for reason, names in reasons.items()]

    def target(self, sparsity: float | None) -> float | None:
        """Return the sparsity to aim at: the given one, or the one that follows if all layers are N:M."""
        if not all(isinstance(structure, NM) for structure in self.structures):
            return sparsity
        shapes = [p.shape for p in self.parameters.values()]
        most = sum(s.most_zeros(shape, axes) for s, shape, axes in zip(self.structures, shapes, self.axes))
        size = sum(map(math.prod, shapes))
        nominal = {1 - s.n / s.m for s in self.structures if isinstance(s, NM)}
        if sparsity is not None and math.ceil(sparsity * size) != most and not any(abs(sparsity - n) < 1e-6 for n in nominal):
            raise ValueError(
                f"sparsity is {sparsity}, but structure {self.label!r} makes it {most / size:.4g}; leave out `sparsity`"
            )
        return most / size


def parse_structure(text: Any) -> Unstructured:
    """Return the structure that a text names."""
    for kind in STRUCTURES:
        if isinstance(text, str) and (found := kind.parse(text)):
            return found
    raise ValueError(f"unknown structure {text!r}; expected a text like {', '.join(repr(kind.example) for kind in STRUCTURES)}")


def as_rules(given: StructureLike) -> list[tuple[Pattern, str]]:
    """Return pairs of pattern and structure. A text holds one structure, or pairs: "classifier*=unstructured, *=2:4"."""
    if isinstance(given, str):
        pairs = [entry.rpartition("=") for entry in given.split(",")]
        return [(pattern.strip() or ..., text.strip()) for pattern, _, text in pairs]
    if not isinstance(given, Mapping):
        raise TypeError(f"structure is {given!r}; expected a text such as '2:4', or a dict such as {{'*': '2:4'}}")
    return [(as_patterns(pattern)[0], text) for pattern, text in given.items()]


def implied_sparsity(given: StructureLike) -> float | None:
    """Return the sparsity of the first rule if all rules are N:M; None if a layer may need another."""
    rules = as_rules(given)
    kinds = [NM.parse(text) for _, text in rules]
    covers_all = any(pattern in (..., "*") for pattern, _ in rules)
    return 1 - kinds[0].n / kinds[0].m if covers_all and kinds[0] and all(kinds) else None


def assign_structures(
    model: nn.Module, parameters: dict[str, nn.Parameter], given: StructureLike, example: Any = None
) -> Assignment:
    """Give each weight the structure of the first pattern that matches it; single weights if none does.

    `example` is an input of the model. Channels need it.
    """
    rules = as_rules(given)
    kinds = {text: parse_structure(text) for text in [*(text for _, text in rules), "unstructured"]}
    owners, axes = find_owners(model), dict(zip(parameters, find_axes(model, parameters)))
    for pattern, _ in rules:
        if pattern is not ... and not any(matches_weight(pattern, owners[p]) for p in parameters.values()):
            raise ValueError(
                f"structure: no weight to prune matches {pattern!r}; a weight's name is, for example, {next(iter(parameters))}"
            )
    chosen, found = dict[str, Unstructured](), Assignment({}, [], [], label_of(rules))
    for name, p in parameters.items():
        matched = (text for pattern, text in rules if pattern is ... or matches_weight(pattern, owners[p]))
        chosen[name] = kinds[next(matched, "unstructured")]
        if reason := chosen[name].reason_to_skip(p.shape, axes[name]):
            found.dense[name] = reason
    everything = dict(parameters)
    if wanted := {name for name, structure in chosen.items() if isinstance(structure, Channels)}:
        everything, found.example = everything | parameters_by_name(model), example
        channels, reasons = couple(find_groups(model, example), everything, wanted)
        found.dense |= reasons
        found.followers = {part.name for group in channels.groups for part in group if not part.ranked}
        chosen |= dict.fromkeys([*(wanted - reasons.keys()), *found.followers], channels)
    for name in [*parameters, *sorted(found.followers)]:
        if name not in found.dense:
            found.parameters[name] = everything[name]
            found.axes.append(axes.get(name, Axes()))
            found.structures.append(chosen[name])
    if not found.parameters:
        reason = next(iter(found.dense.values()))
        raise ValueError(f"structure {found.label!r} fits none of the {len(parameters)} weights to prune: {reason}")
    return found


def find_groups(model: nn.Module, example: Any) -> list[Group]:
    """Return the coupled channels: `example` is an input of the model, or holds the groups already."""
    if isinstance(example, list) and example and isinstance(example[0], Group):
        return example
    if example is None:
        raise ValueError("structure 'channel' needs an input of the model, to find coupled channels: pass `example=`")
    if any(is_dtensor(p) for p in model.parameters()):
        raise ValueError(
            "structure 'channel' cannot find coupled channels after FSDP2 has split the model. Before fully_shard, call "
            "groups = optg.core.channels.coupled_channels(model, input); then pass example=groups"
        )
    return coupled_channels(model, example)


def label_of(rules: list[tuple[Pattern, str]]) -> str:
    """Return rules as a text."""
    names = [getattr(pattern, "__name__", pattern) for pattern, _ in rules]
    return ", ".join(text if name is ... else f"{name}={text}" for name, (_, text) in zip(names, rules))
