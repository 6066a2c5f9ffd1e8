"""Budgets: how many weights each layer loses at a given sparsity. To add one, write a function and list it in BUDGETS.

A budget function returns each layer's share of kept weights up to a common factor. `layer_zeros` scales and rounds the shares
so that the layers together lose exactly ⌈P·N⌉ weights.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache

import torch

from optg.core.ranking import zeros_at


def uniform(shapes: Sequence[torch.Size]) -> list[float]:
    """Keep the same share of every layer."""
    return [1.0 for _ in shapes]


def erk(shapes: Sequence[torch.Size]) -> list[float]:
    """Erdős–Rényi kernel (RigL): density ∝ sum of a layer's dimensions / their product, so small layers stay denser."""
    return [sum(shape) / shape.numel() for shape in shapes]


Budget = Callable[[Sequence[torch.Size]], list[float]]
BUDGETS: dict[str, Budget] = {f.__name__: f for f in (uniform, erk)}


def layer_zeros(budget: str, shapes: Sequence[torch.Size], sparsity: float, least: Sequence[int] | None = None) -> list[int]:
    """Return the zeros of each layer under a named budget; together they are ⌈P·N⌉. Each layer keeps its `least` weights."""
    return list(cached_zeros(budget, tuple(shapes), sparsity, tuple(least or [0] * len(shapes))))


@lru_cache
def cached_zeros(budget: str, shapes: tuple[torch.Size, ...], sparsity: float, least: tuple[int, ...]) -> list[int]:
    """Cached because some methods ask at every step."""
    sizes = [shape.numel() for shape in shapes]
    kept = sum(sizes) - zeros_at(sparsity, sum(sizes))
    return [size - k for size, k in zip(sizes, fill_above(BUDGETS[budget](shapes), sizes, kept, least))]


def fill_above(shares: Sequence[float], sizes: Sequence[int], kept: int, least: Sequence[int]) -> list[int]:
    """Like `fill`, but no layer keeps less than its `least`; the others share the rest."""
    found = list(least)
    free = list(range(len(sizes)))
    while True:
        rest = kept - sum(found) + sum(found[i] for i in free)
        parts = fill([shares[i] for i in free], [sizes[i] for i in free], rest)
        enough = [i for i, part in zip(free, parts) if part >= least[i]]
        if len(enough) == len(free):
            break
        free = enough
    for i, part in zip(free, parts):
        found[i] = part
    return found


def fill(shares: Sequence[float], sizes: Sequence[int], kept: int) -> list[int]:
    """Return the kept weights of each layer: size × share × one common factor, at most the size, `kept` in total.

    A layer whose part would exceed its size is kept whole, and the factor is computed again for the others. The weights that
    rounding down leaves over go to the layers with the largest remainders.
    """
    full = [False] * len(sizes)
    while True:
        room = kept - sum(n for n, whole in zip(sizes, full) if whole)
        demand = sum(n * s for n, s, whole in zip(sizes, shares, full) if not whole)
        factor = room / demand if demand else 0.0
        over = [not whole and s * factor > 1 for s, whole in zip(shares, full)]
        if not any(over):
            break
        full = [a or b for a, b in zip(full, over)]
    exact = [float(n) if whole else min(float(n), n * s * factor) for n, s, whole in zip(sizes, shares, full)]
    floor = [min(int(e), n) for e, n in zip(exact, sizes)]
    by_remainder = sorted((i for i in range(len(sizes)) if floor[i] < sizes[i]), key=lambda i: floor[i] - exact[i])
    for i in by_remainder[: kept - sum(floor)]:
        floor[i] += 1
    return floor
