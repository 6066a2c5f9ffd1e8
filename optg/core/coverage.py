"""Warn if `sparsify` leaves a large share of a model's matrix weights dense."""

import re
import warnings
from collections.abc import Sequence

from torch import Tensor, nn

from optg.core.layer_kinds import EMBEDDINGS, Owner
from optg.core.prunable import (
    Pattern,
    find_adapters,
    find_candidates,
    find_computed,
    find_frozen_prunable,
    find_owners,
    matches_weight,
)

ENOUGH = 0.8  # share of the matrix weights that may be covered without a word
TABLES = ("embed", "token", "position")  # in the name of a parameter that is looked up or added, not multiplied by


def warn_of_coverage(
    model: nn.Module, covered: dict[str, nn.Parameter], include: Sequence[Pattern] | None, exclude: Sequence[Pattern]
) -> None:
    """Warn if the covered weights are less than 80 % of the matrix weights, unless the user chose them with `include`."""
    if include is not None and ... not in include:
        return
    dense = {name: p.numel() for name, p in find_matrices(model, exclude).items() if name not in covered}
    pruned = sum(p.numel() for p in covered.values())
    if pruned >= ENOUGH * (total := pruned + sum(dense.values())):
        return
    largest = sorted(dense, key=lambda name: -dense[name])
    named = ", ".join(f"{name} ({dense[name]:,})" for name in largest[:3])
    patterns = list(dict.fromkeys(re.sub(r"(?<=\.)\d+(?=\.)", "*", name) for name in largest))
    include_text = ", ".join(["...", *map(repr, patterns[:5])])
    warnings.warn(
        f"sparsify covers {pruned / total:.0%} of the matrix weights ({pruned:,} of {total:,}). These stay dense: {named}"
        f"{' …' if len(largest) > 3 else ''}. To prune them too, pass include=[{include_text}] (`...` is the default), or "
        "register their class with optg.prunable; to leave them dense, name them in `exclude`",
        stacklevel=3,
    )


def find_matrices(model: nn.Module, exclude: Sequence[Pattern], trained: bool = True) -> dict[str, nn.Parameter]:
    """Return the matrix weights of a model by name: the trained ones, or the frozen ones.

    Matrix weights are parameters of two or more dimensions, without biases, norms, embeddings (also positions and tokens),
    adapters, and parameters with a single dimension above 1 or a leading dimension of 1, which are added or broadcast. Weights
    that `exclude` matches do not count either, nor do weights that a layer computes at every call: these have a warning of
    their own.
    """
    owners, adapters = find_owners(model), find_adapters(model)
    return {
        name: p
        for name, p in find_candidates(model, owners, find_computed(model), trained).items()
        if p not in adapters
        and is_matrix(p)
        and not any(is_table(owner) for owner in owners[p])
        and not any(matches_weight(pattern, owners[p]) for pattern in exclude)
    }


def find_frozen(model: nn.Module, include: Sequence[Pattern] | None, exclude: Sequence[Pattern]) -> dict[str, nn.Parameter]:
    """Return the frozen weights that `sparsify` would prune, or warn of, if they were trained."""
    frozen = find_frozen_prunable(model, include, exclude)
    return frozen | find_matrices(model, exclude, trained=False) if include is None or ... in include else frozen


def is_matrix(p: Tensor) -> bool:
    return p.shape[0] > 1 and sum(size > 1 for size in p.shape) >= 2


def is_table(owner: Owner) -> bool:
    """Return whether a parameter is an embedding: by its class, or by a name such as `pos_embed` or `cls_token`."""
    embedding = isinstance(owner.module, EMBEDDINGS) or "Embedding" in type(owner.module).__name__
    return embedding or any(word in owner.key.lower() for word in TABLES)
