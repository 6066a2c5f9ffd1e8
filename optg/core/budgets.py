"""One sparsity -> a budget of zeros for each layer. Adding a budget is one function and one name in BUDGETS.

A budget function gives each layer's share of kept weights, up to a common factor; `layer_zeros` scales and rounds them so
that the layers together remove exactly what was asked for.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache

import torch

from optg.core.ranking import zeros_at


def uniform(shapes: Sequence[torch.Size]) -> list[float]:
    """Every layer keeps the same share of its weights."""
    return [1.0 for _ in shapes]


def erk(shapes: Sequence[torch.Size]) -> list[float]:
    """Erdős–Rényi-Kernel (RigL): density ∝ the sum of a layer's dimensions over their product, so small layers stay denser."""
    return [sum(shape) / shape.numel() for shape in shapes]


Budget = Callable[[Sequence[torch.Size]], list[float]]
BUDGETS: dict[str, Budget] = {f.__name__: f for f in (uniform, erk)}


def layer_zeros(budget: str, shapes: Sequence[torch.Size], sparsity: float) -> list[int]:
    """Zeros of each layer under a named budget: ⌈P·N⌉ together."""
    return list(remembered(budget, tuple(shapes), sparsity))


@lru_cache
def remembered(budget: str, shapes: tuple[torch.Size, ...], sparsity: float) -> list[int]:
    """Some methods ask at every step."""
    sizes = [shape.numel() for shape in shapes]
    kept = sum(sizes) - zeros_at(sparsity, sum(sizes))
    return [size - k for size, k in zip(sizes, fill(BUDGETS[budget](shapes), sizes, kept))]


def fill(shares: Sequence[float], sizes: Sequence[int], kept: int) -> list[int]:
    """Kept weights of each layer: sizes × shares × one common factor, no layer above its size, `kept` together.

    A layer whose part would exceed its size is kept whole and the factor is found again for the rest; what rounding down
    leaves over goes to the largest remainders.
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
