"""SGD with momentum on what a method learns beside the weights: m ← μ·m + direction, score ← score − η·m.

The optimizer never sees the scores, so they behave the same under SGD, AdamW or any other. A step that a GradScaler skips
leaves scores and momenta as they are.
"""

import torch
from torch import Tensor

from optg.core.weights import SparseWeights


class ScoreSGD:
    def __init__(self, scores: list[Tensor], momentum: float) -> None:
        self.scores = scores
        self.momenta = [torch.zeros_like(s) for s in scores]
        self.momentum = momentum

    def add_criterion(self, weights: SparseWeights, rates: list[Tensor]) -> None:
        """Step along OptG's criterion g·w (Eq. 10), then zero the gradients of removed weights: one pass over everything."""
        if grads := weights.grads:
            lists = weights.masks, weights.values, self.momenta, self.scores, rates
            picked = ([tensors[i] for i in grads] for tensors in lists)
            weights.passes.accumulate(list(grads.values()), *picked, self.momentum, weights.skipped)

    def step(self, weights: SparseWeights, layers: list[int], directions: list[Tensor], rates: list[Tensor]) -> None:
        """Step along a direction for each of some layers."""
        scores, momenta = [self.scores[i] for i in layers], [self.momenta[i] for i in layers]
        self.update(weights, momenta, directions)
        torch._foreach_addcmul_(scores, momenta, [rates[i] for i in layers], value=-1.0)

    def update(self, weights: SparseWeights, momenta: list[Tensor], *terms: list[Tensor]) -> None:
        """m ← μ·m + the terms of the direction, added in order."""
        if weights.skipped is None:
            torch._foreach_mul_(momenta, self.momentum)
            for term in terms:
                torch._foreach_add_(momenta, term)
        else:
            for m, *parts in zip(momenta, *terms):
                m.copy_(weights.unless_skipped(sum(parts, self.momentum * m), m))
