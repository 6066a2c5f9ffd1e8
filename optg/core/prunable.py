"""Find the weights of a model that may be pruned, and their names."""

import warnings
from collections.abc import Iterable, Iterator, Sequence
from fnmatch import fnmatchcase
from types import EllipsisType
from typing import Any

import torch
from torch import nn

from optg.core.layer_kinds import EMBEDDINGS, NORMS, Axes, Owner, default_axes, has_computed_weight, is_bias, is_layer

Pattern = str | type[nn.Module] | EllipsisType
Link = tuple[dict[str, nn.Module | None], str, Any]  # the children of a module, and the name and value of one of them
DEFAULT: tuple[Pattern, ...] = (...,)  # a pattern that stands for everything that is prunable by default
WRAPPERS = {  # class name -> the attribute that holds the model; torch.compile's is `_orig_mod`
    "DistributedDataParallel": "module",
    "DataParallel": "module",
    "AveragedModel": "module",
    "ModelEma": "ema",  # timm
    "ModelEmaV2": "module",
    "ModelEmaV3": "module",
    "DeepSpeedEngine": "module",
    "_FabricModule": "_forward_module",  # Lightning Fabric
    "GradSampleModule": "_module",  # opacus
}


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
    """Return the weights to prune by name: those that are prunable by default, or those that `include` matches.

    Prunable by default are the weights of linear, convolution, attention and recurrent layers, stacks of experts, and the
    classes given to `optg.prunable`. A pattern is a module class, a shell pattern for the name of a parameter or module, or
    `...` for the default. Biases, norms and frozen parameters are never prunable. An embedding, a weight tied to one, or an
    adapter (LoRA) is prunable only if `include` matches it. Layers that compute their weight at every call (weight_norm and
    other parametrizations, weight standardization) stay dense, with a warning.
    """
    include = DEFAULT if include is None else include
    if ... in exclude:
        raise ValueError("exclude holds `...`, which stands for all default weights; expected names or module classes")
    owners = find_owners(model)
    computed = find_computed(model)
    if lazy := [name for name, p in parameters_by_name(model).items() if nn.parameter.is_lazy(p)]:
        raise ValueError(f"{lazy[0]} has no shape yet; run one batch through the model before sparsify")
    candidates = find_candidates(model, owners, computed)
    for pattern in [*include, *exclude]:
        known = pattern is ... or any(matches_weight(pattern, owners[p]) for p in candidates.values())
        if not known and not any(matches_module(pattern, *layer) for layer in computed.items()):
            raise ValueError(
                f"the pattern {pattern!r} matches no prunable weight. Patterns are module classes or shell patterns for "
                f"names such as {', '.join(list(candidates)[:3]) or '(this model has none)'}; biases, norms and frozen "
                "parameters are never pruned"
            )
    warn_of_computed_weights(computed, include, exclude)
    return select(model, candidates, owners, include, exclude)


def find_frozen_prunable(
    model: nn.Module, include: Sequence[Pattern] | None, exclude: Sequence[Pattern]
) -> dict[str, nn.Parameter]:
    """Return the weights that `find_prunable` leaves out only because they are frozen."""
    owners = find_owners(model)
    candidates = find_candidates(model, owners, {}, trained=False)
    return select(model, candidates, owners, DEFAULT if include is None else include, exclude)


def select(
    model: nn.Module,
    candidates: dict[str, nn.Parameter],
    owners: dict[nn.Parameter, list[Owner]],
    include: Sequence[Pattern],
    exclude: Sequence[Pattern],
) -> dict[str, nn.Parameter]:
    """Return the candidates that `include` matches and `exclude` does not."""
    adapters = find_adapters(model)

    def wanted(p: nn.Parameter) -> bool:
        if any(matches_weight(pattern, owners[p]) for pattern in exclude):
            return False
        by_default = p not in adapters and is_default(p, owners[p])
        return any(by_default if pattern is ... else matches_weight(pattern, owners[p]) for pattern in include)

    return {name: p for name, p in candidates.items() if wanted(p)}


def is_default(p: nn.Parameter, owners: Sequence[Owner]) -> bool:
    """Return whether a candidate is prunable by default, adapters aside."""
    embedding = any(isinstance(owner.module, EMBEDDINGS) for owner in owners)
    return not embedding and any(default_axes(owner, p) is not None for owner in owners)


def find_candidates(
    model: nn.Module, owners: dict[nn.Parameter, list[Owner]], computed: dict[str, nn.Module], trained: bool = True
) -> dict[str, nn.Parameter]:
    """Return the parameters that may be pruned at all: of two or more dimensions, neither biases nor norms, not frozen.

    With `trained=False`, return the frozen ones instead.
    """
    sources = {p for module in computed.values() for p in module.parameters()}
    return {
        name: p
        for name, p in parameters_by_name(model).items()
        if p.ndim >= 2
        and p.requires_grad == trained
        and p not in sources
        and not is_bias(name.split(".")[-1])
        and not any(isinstance(owner.module, NORMS) for owner in owners[p])
    }


def find_computed(model: nn.Module) -> dict[str, nn.Module]:
    """Return the trained layers that compute their weight at every call."""
    return {
        owner.name: owner.module
        for owner in layers_of(model)
        if has_computed_weight(owner.module) and any(p.requires_grad for p in owner.module.parameters())
    }


def find_adapters(model: nn.Module) -> set[nn.Parameter]:
    """Return the parameters of adapters: those that PEFT's layers list as such, and those called lora_A, lora_B, …"""
    found = {p for name, p in parameters_by_name(model).items() if any(part.startswith("lora_") for part in name.split("."))}
    for module in unwrap(model).modules():
        for name in getattr(module, "adapter_layer_names", ()):
            adapter = getattr(module, name, None)
            found.update(adapter.parameters() if isinstance(adapter, nn.Module) else [])
    return found


def find_axes(model: nn.Module, parameters: dict[str, nn.Parameter]) -> list[Axes]:
    """Return the axes of each parameter. A weight of an unknown module is taken to be output-first, like a Linear's."""
    owners = find_owners(model)
    return [next(filter(None, (default_axes(owner, p) for owner in owners[p])), Axes()) for p in parameters.values()]


def find_holders(model: nn.Module, parameters: Iterable[nn.Parameter]) -> list[tuple[nn.Module, str]]:
    """Return a module that holds each parameter, and the name that the parameter has in it."""
    owners = find_owners(model)
    return [(owners[p][0].module, owners[p][0].key) for p in parameters]


def find_links(model: nn.Module, modules: Iterable[nn.Module]) -> tuple[list[Link], set[nn.Module]]:
    """Return the links by which these modules hang on the model, each once, and the modules that do not."""
    root, links, missing = unwrap(model), dict[tuple[nn.Module, str], Link](), set(modules)
    for name, module in root.named_modules():
        if module in missing:
            missing.remove(module)
            parent = root
            for key in name.split(".") if name else ():
                children = parent._modules
                parent = links.setdefault((parent, key), (children, key, children[key]))[2]
    return list(links.values()), missing


def layers_of(model: nn.Module) -> Iterator[Owner]:
    """Yield the layers whose weights are prunable by default; a layer that is used twice comes twice."""
    for name, module in unwrap(model).named_modules(remove_duplicate=False):
        if is_layer(module):
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
    """Return whether a class or shell pattern matches a module. `...` matches none."""
    return isinstance(module, pattern) if isinstance(pattern, type) else pattern is not ... and fnmatchcase(name, pattern)


def matches_weight(pattern: Pattern, owners: Sequence[Owner]) -> bool:
    """Return whether a pattern matches a weight by any of its names, or by any module that holds it."""
    named = isinstance(pattern, str) and any(fnmatchcase(owner.parameter, pattern) for owner in owners)
    return named or any(matches_module(pattern, owner.name, owner.module) for owner in owners)


def warn_of_computed_weights(computed: dict[str, nn.Module], include: Sequence[Pattern], exclude: Sequence[Pattern]) -> None:
    def matches(patterns: Sequence[Pattern], name: str) -> bool:
        return any(pattern is ... or matches_module(pattern, name, computed[name]) for pattern in patterns)

    if dense := [name for name in computed if matches(include, name) and not matches(exclude, name)]:
        warnings.warn(
            f"some layers stay dense: {', '.join(sorted(dense)[:3])}{' …' if len(dense) > 3 else ''}. Their weights are "
            "computed from other parameters at every call (weight_norm, parametrizations, weight standardization). Remove the "
            "parametrization or use plain layers instead, or leave these layers out with `exclude`",
            stacklevel=4,
        )


def as_patterns(patterns: Pattern | Iterable[Pattern]) -> tuple[Pattern, ...]:
    """Return one pattern or several as a tuple, and refuse anything else."""
    alone = patterns is ... or isinstance(patterns, (str, type, nn.Module)) or not isinstance(patterns, Iterable)
    found: list[Any] = [patterns] if alone else list(patterns)  # type: ignore[arg-type]
    for pattern in found:
        if pattern is not ... and not isinstance(pattern, (str, type)):
            raise TypeError(
                f"{pattern!r} is not a pattern; expected a module class or the name of a layer, such as 'encoder.*'"
            )
    return tuple(found)
