"""Global Sparse Momentum SGD for Pruning Very Deep Neural Networks (GSM). Ding et al., 2019 (arXiv:1909.12778).

The model stays dense, but at each step only the (1 − P)·N weights with the largest |dL/dw · w| of all layers receive their
gradient. Weight decay shrinks the others until they can be removed at the end of training at no cost. It needs weight decay
and high momentum (the paper: 0.98 to 0.999).
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from optg.core.clock import Clock
from optg.core.weights import SparseWeights
from optg.methods.base import Method


@dataclass
class GSM(Method):
    paper: ClassVar[str] = "Ding et al. 2019"
    when: ClassVar[str] = "after"
    revives: ClassVar[bool] = False

    needs_all_gradients: ClassVar[bool] = True

    def after_backward(self, weights: SparseWeights, clock: Clock, lr: list[Tensor]) -> None:
        grads, values = weights.grads, weights.values
        known = dict[int, Tensor]()
        if grads:
            products = torch._foreach_mul(list(grads.values()), [values[i] for i in grads])
            torch._foreach_abs_(products)
            known = dict(zip(grads, products))
        saliency = [known[i] if i in known else torch.zeros_like(w) for i, w in enumerate(values)]
        active = weights.keep_top(saliency, weights.zeros(weights.target))
        weights.mask_gradients(masks=active)

    def capturable(self, clock: Clock) -> bool:
        return False

    def target_step(self, clock: Clock) -> int:
        return clock.total

    def due(self, clock: Clock) -> bool:
        return clock.finished

    def after_update(self, weights: SparseWeights, clock: Clock) -> None:
        self.cut(weights, weights.target)
