"""Find the weights of a model that may be pruned, their names and the meaning of their dimensions."""

import warnings
from collections.abc import Iterable, Iterator, Sequence
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd
from torch.nn.utils.parametrize import is_parametrized

Pattern = str | type[nn.Module]
PRUNABLE = (nn.Linear, nn.Bilinear, _ConvNd, nn.MultiheadAttention)
EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)
NORMS = (nn.LayerNorm, nn.RMSNorm)  # other norms have one dimension

WRAPPERS = {  # class name -> the attribute that holds the model; torch.compile's is `_orig_mod`
    "DistributedDataParallel": "module",
    "DataParallel": "module",
    "AveragedModel": "module",
    "ModelEma": "module",  # timm
    "ModelEmaV2": "module",
    "ModelEmaV3": "module",
    "DeepSpeedEngine": "module",
    "_FabricModule": "_forward_module",  # Lightning Fabric
    "GradSampleModule": "_module",  # opacus
}


class Axes(NamedTuple):
    """The dimensions of a weight that run over its outputs and inputs, and the number of equal parts stacked in it."""

    output: int = 0
    input: int = 1
    parts: int = 1  # along the output dimension: an attention layer's `in_proj_weight` stacks query, key and value


class Owner(NamedTuple):
    """A module that holds a parameter. A shared parameter has several."""

    parameter: str  # the parameter's name
    name: str  # the module's name
    module: nn.Module


def wrapper_chain(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the model, then the module inside each wrapper (DDP, torch.compile, Fabric, EMA models …) in turn."""
    inner: nn.Module | None = model
    while inner is not None:
        yield inner
        kinds = {kind.__name__ for kind in type(inner).__mro__}
        attribute = next((attribute for kind, attribute in WRAPPERS.items() if kind in kinds), "_orig_mod")
        inner = getattr(inner, attribute, None)


def unwrap(model: nn.Module) -> nn.Module:
    """Return the module inside all wrappers."""
    return list(wrapper_chain(model))[-1]


def parameters_by_name(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return each parameter once, by its name in the unwrapped, uncompiled model."""
    return {name.replace("_orig_mod.", ""): p for name, p in unwrap(model).named_parameters()}


def optimizer_parameters(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    """Return all parameters of an optimizer, in its own order."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def find_prunable(model: nn.Module, include: Sequence[Pattern] | None, exclude: Sequence[Pattern]) -> dict[str, nn.Parameter]:
    """Return the weights to prune by name: those of linear, convolution and attention layers, or those that `include` matches.

    A pattern is a module class, or a shell pattern for the name of a parameter or module. Biases, norms and frozen parameters
    are never prunable. An embedding, or a weight tied to one, is prunable only if `include` matches it. Layers that compute
    their weight from other parameters at every call (weight_norm and other parametrizations) stay dense, with a warning.
    """
    owners = find_owners(model)
    computed = {
        owner.name: owner.module
        for owner in layers_of(model)
        if has_computed_weight(owner.module) and any(p.requires_grad for p in owner.module.parameters())
    }
    if lazy := [name for name, p in parameters_by_name(model).items() if nn.parameter.is_lazy(p)]:
        raise ValueError(f"{lazy[0]} has no shape yet; run one batch through the model before sparsify")
    sources = {p for module in computed.values() for p in module.parameters()}
    candidates = {
        name: p
        for name, p in parameters_by_name(model).items()
        if p.ndim >= 2
        and p.requires_grad
        and p not in sources
        and not name.split(".")[-1].startswith("bias")  # attention has biases of 3 dimensions
        and not any(isinstance(owner.module, NORMS) for owner in owners[p])
    }
    for pattern in [*(include or ()), *exclude]:
        known = any(matches_weight(pattern, owners[p]) for p in candidates.values())
        if not known and not any(matches_module(pattern, *layer) for layer in computed.items()):
            raise ValueError(
                f"the pattern {pattern!r} matches no prunable weight. Patterns are module classes or shell patterns for "
                f"names such as {', '.join(list(candidates)[:3]) or '(this model has none)'}; biases, norms and frozen "
                "parameters are never pruned"
            )
    warn_of_computed_weights(computed, include, exclude)

    def wanted(p: nn.Parameter) -> bool:
        if any(matches_weight(pattern, owners[p]) for pattern in exclude):
            return False
        if include is not None:
            return any(matches_weight(pattern, owners[p]) for pattern in include)
        kinds = [owner.module for owner in owners[p]]
        return any(isinstance(m, PRUNABLE) for m in kinds) and not any(isinstance(m, EMBEDDINGS) for m in kinds)

    return {name: p for name, p in candidates.items() if wanted(p)}


def find_axes(model: nn.Module, parameters: dict[str, nn.Parameter]) -> list[Axes]:
    """Return the axes of each parameter. A weight of an unknown module is taken to be output-first, like a Linear's."""
    owners = find_owners(model)
    return [axes_in(owners[p][0]) for p in parameters.values()]


def find_holders(model: nn.Module, parameters: dict[str, nn.Parameter]) -> list[tuple[nn.Module, str]]:
    """Return a module that holds each parameter, and the name that the parameter has in it."""
    owners = find_owners(model)
    return [(owners[p][0].module, owners[p][0].parameter.rpartition(".")[2]) for p in parameters.values()]


def axes_in(owner: Owner) -> Axes:
    if isinstance(owner.module, _ConvTransposeNd):
        return Axes(output=1, input=0)
    stacked = isinstance(owner.module, nn.MultiheadAttention) and owner.parameter.endswith("in_proj_weight")
    return Axes(parts=3 if stacked else 1)


def layers_of(model: nn.Module) -> Iterator[Owner]:
    """Yield the layers whose weights are prunable by default; a layer that is used twice comes twice."""
    for name, module in unwrap(model).named_modules(remove_duplicate=False):
        if isinstance(module, PRUNABLE):
            yield Owner("", name.replace("_orig_mod.", ""), module)


def find_owners(model: nn.Module) -> dict[nn.Parameter, list[Owner]]:
    """Return every module that holds each parameter."""
    owners: dict[nn.Parameter, list[Owner]] = {}
    for long_name, module in unwrap(model).named_modules(remove_duplicate=False):
        name = long_name.replace("_orig_mod.", "")
        for key, p in module._parameters.items():
            if p is not None:
                owners.setdefault(p, []).append(Owner(f"{name}.{key}" if name else key, name, module))
    return owners


def matches_module(pattern: Pattern, name: str, module: nn.Module) -> bool:
    return isinstance(module, pattern) if isinstance(pattern, type) else fnmatchcase(name, pattern)


def matches_weight(pattern: Pattern, owners: Sequence[Owner]) -> bool:
    """Return whether a pattern matches a weight by any of its names, or by any module that holds it."""
    named = isinstance(pattern, str) and any(fnmatchcase(owner.parameter, pattern) for owner in owners)
    return named or any(matches_module(pattern, owner.name, owner.module) for owner in owners)


def has_computed_weight(layer: nn.Module) -> bool:
    """Return whether the layer uses torch.nn.utils.parametrizations, or the older weight_norm."""
    return is_parametrized(layer) or "weight_g" in layer._parameters


def warn_of_computed_weights(
    computed: dict[str, nn.Module], include: Sequence[Pattern] | None, exclude: Sequence[Pattern]
) -> None:
    def matches(patterns: Sequence[Pattern], name: str) -> bool:
        return any(matches_module(pattern, name, computed[name]) for pattern in patterns)

    if dense := [name for name in computed if (include is None or matches(include, name)) and not matches(exclude, name)]:
        warnings.warn(
            f"{', '.join(sorted(dense)[:3])}{' …' if len(dense) > 3 else ''} stay dense: their weights are computed from "
            "other parameters at every call (weight_norm, parametrizations). Remove the parametrization first, or leave "
            "these layers out with `exclude`",
            stacklevel=4,
        )


def as_patterns(patterns: Pattern | Iterable[Pattern]) -> tuple[Pattern, ...]:
    """Return one pattern or several as a tuple, and refuse anything else."""
    alone = isinstance(patterns, (str, type, nn.Module)) or not isinstance(patterns, Iterable)
    found: list[Any] = [patterns] if alone else list(patterns)  # type: ignore[arg-type]
    for pattern in found:
        if not isinstance(pattern, (str, type)):
            raise TypeError(
                f"{pattern!r} is not a pattern; expected a module class or the name of a layer, such as 'encoder.*'"
            )
    return tuple(found)
