"""Which weights of a model may be pruned, and under which names."""

import warnings
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase

import torch
from torch import nn
from torch.nn.utils.parametrize import is_parametrized

Pattern = str | type[nn.Module]
PRUNABLE = (nn.Linear, nn.Bilinear, nn.modules.conv._ConvNd, nn.MultiheadAttention)
EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)
NORMS = (nn.LayerNorm, nn.RMSNorm)  # others have one dimension


def wrapper_chain(model: nn.Module) -> Iterator[nn.Module]:
    """The model and, one by one, the modules inside DDP, DataParallel, torch.compile and averaging wrappers."""
    inner: nn.Module | None = model
    while inner is not None:
        yield inner
        if isinstance(inner, (nn.parallel.DistributedDataParallel, nn.DataParallel, torch.optim.swa_utils.AveragedModel)):
            inner = inner.module
        else:
            inner = getattr(inner, "_orig_mod", None)


def unwrap(model: nn.Module) -> nn.Module:
    """The module inside all wrappers."""
    return list(wrapper_chain(model))[-1]


def parameters_by_name(model: nn.Module) -> dict[str, nn.Parameter]:
    """Each parameter once, under the name it has in the bare, uncompiled model."""
    return {name.replace("_orig_mod.", ""): p for name, p in unwrap(model).named_parameters()}


def optimizer_parameters(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    """All parameters of an optimizer, in its own order."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def find_prunable(model: nn.Module, include: Sequence[Pattern] | None, exclude: Sequence[Pattern]) -> dict[str, nn.Parameter]:
    """The weights to prune, by name: those of linear, convolution and attention layers, or what `include` asks for.

    A pattern is a module class, or a shell pattern for the name of a parameter or module. Biases, norms and frozen parameters
    are never prunable; an embedding, or a weight tied to one, only when asked for. Layers whose weight is computed from
    others at every call (weight_norm and other parametrizations) stay as they are, with a warning.
    """
    owners: dict[nn.Parameter, list[tuple[str, str, nn.Module]]] = {}  # every name, with the owner's name and the owner
    computed: dict[str, nn.Module] = {}
    for long_name, module in unwrap(model).named_modules(remove_duplicate=False):
        name = long_name.replace("_orig_mod.", "")
        if isinstance(module, PRUNABLE) and has_computed_weight(module) and any(p.requires_grad for p in module.parameters()):
            computed[name] = module
        for key, p in module._parameters.items():
            if p is not None:
                owners.setdefault(p, []).append((f"{name}.{key}" if name else key, name, module))
    if lazy := [name for name, p in parameters_by_name(model).items() if nn.parameter.is_lazy(p)]:
        raise ValueError(f"{lazy[0]} has no shape yet; run one batch through the model before sparsify")
    made_of = {p for module in computed.values() for p in module.parameters()}
    candidates = {
        name: p
        for name, p in parameters_by_name(model).items()
        if p.ndim >= 2
        and p.requires_grad
        and p not in made_of
        and not name.split(".")[-1].startswith("bias")  # attention has a bias of 3 dimensions
        and not any(isinstance(module, NORMS) for *_, module in owners[p])
    }

    def fits(pattern: Pattern, name: str, module: nn.Module) -> bool:
        return isinstance(module, pattern) if isinstance(pattern, type) else fnmatchcase(name, pattern)

    def matches(pattern: Pattern, p: nn.Parameter) -> bool:
        named = isinstance(pattern, str) and any(fnmatchcase(name, pattern) for name, *_ in owners[p])
        return named or any(fits(pattern, owner, module) for _, owner, module in owners[p])

    for pattern in [*(include or ()), *exclude]:
        known = any(matches(pattern, p) for p in candidates.values())
        if not known and not any(fits(pattern, *layer) for layer in computed.items()):
            raise ValueError(
                f"the pattern {pattern!r} matches no prunable weight. Patterns are module classes or shell patterns for "
                f"names such as {', '.join(list(candidates)[:3]) or '(this model has none)'}; biases, norms and frozen "
                "parameters are never pruned"
            )
    asked = {name for name, layer in computed.items() if include is None or any(fits(i, name, layer) for i in include)}
    if dense := [name for name in asked if not any(fits(e, name, computed[name]) for e in exclude)]:
        warnings.warn(
            f"{', '.join(sorted(dense)[:3])}{' …' if len(dense) > 3 else ''} stay dense: their weights are computed from "
            "others at every call (weight_norm, parametrizations). Remove that first, or leave them out with `exclude`",
            stacklevel=5,
        )

    def wanted(p: nn.Parameter) -> bool:
        if include is not None:
            return any(matches(pattern, p) for pattern in include)
        kinds = [module for *_, module in owners[p]]
        return any(isinstance(m, PRUNABLE) for m in kinds) and not any(isinstance(m, EMBEDDINGS) for m in kinds)

    return {n: p for n, p in candidates.items() if wanted(p) and not any(matches(e, p) for e in exclude)}


def has_computed_weight(layer: nn.Module) -> bool:
    """Is it under torch.nn.utils.parametrizations, or the weight_norm before them?"""
    return is_parametrized(layer) or "weight_g" in layer._parameters
