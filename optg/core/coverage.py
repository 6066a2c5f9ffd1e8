"""Warn if `sparsify` leaves a large share of a model's matrix weights dense."""

import re
import warnings
from collections.abc import Sequence

from torch import Tensor, nn

from optg.core.layer_kinds import EMBEDDINGS, Owner
from optg.core.prunable import Pattern, find_adapters, find_candidates, find_computed, find_owners, matches_weight

ENOUGH = 0.8  # share of the matrix weights that may be covered without a word
TABLES = ("embed", "token", "position")  # in the name of a parameter that is looked up or added, not multiplied by


def warn_of_coverage(
    model: nn.Module, covered: dict[str, nn.Parameter], include: Sequence[Pattern] | None, exclude: Sequence[Pattern]
) -> None:
    """Warn if the covered weights are less than 80 % of the matrix weights, unless the user chose them with `include`.

    Matrix weights are trained parameters of two or more dimensions, without biases, norms, embeddings (also positions and
    tokens), adapters, and parameters with a single dimension above 1 or a leading dimension of 1, which are added or
    broadcast. Not counted either: weights that `exclude` matches, and those that a layer computes at every call, which have
    a warning of their own.
    """
    if include is not None and ... not in include:
        return
    owners = find_owners(model)
    candidates, adapters = find_candidates(model, owners, find_computed(model)), find_adapters(model)
    dense = {
        name: p.numel()
        for name, p in candidates.items()
        if name not in covered
        and p not in adapters
        and is_matrix(p)
        and not any(is_table(owner) for owner in owners[p])
        and not any(matches_weight(pattern, owners[p]) for pattern in exclude)
    }
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


def is_matrix(p: Tensor) -> bool:
    return p.shape[0] > 1 and sum(size > 1 for size in p.shape) >= 2


def is_table(owner: Owner) -> bool:
    """Return whether a parameter is an embedding: by its class, or by a name such as `pos_embed` or `cls_token`."""
    embedding = isinstance(owner.module, EMBEDDINGS) or "Embedding" in type(owner.module).__name__
    return embedding or any(word in owner.key.lower() for word in TABLES)
