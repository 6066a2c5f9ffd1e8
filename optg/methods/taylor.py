"""Importance Estimation for Neural Network Pruning (Taylor-FO). Molchanov et al., 2019 (arXiv:1906.10771).

Remove the weights whose removal changes the loss least, to first order: score = Σ (dL/dw · w)² over the steps since the last
cut. Removed weights stay removed.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from optg.core.clock import Clock
from optg.core.probe import Probe
from optg.core.weights import SparseWeights
from optg.methods.base import Gradual


@dataclass
class Taylor(Gradual):
    paper: ClassVar[str] = "Molchanov et al. 2019"
    revives: ClassVar[bool] = False
    needs_all_gradients: ClassVar[bool] = True

    every: int | str = 100

    def prepare(self, weights: SparseWeights, clock: Clock, probe: Probe) -> None:
        self.state = {"scores": weights.zeros_like()}
        self.used = False  # whether a cut has used the scores, so that a new sum must begin

    def scores(self, weights: SparseWeights) -> list[Tensor]:
        return self.layers("scores")

    def capturable(self, clock: Clock) -> bool:
        return not self.used and not self.due(clock)

    def after_update(self, weights: SparseWeights, clock: Clock) -> None:
        super().after_update(weights, clock)
        self.used = True

    def after_backward(self, weights: SparseWeights, clock: Clock, lr: list[Tensor]) -> None:
        scores, values = self.layers("scores"), weights.values
        if self.used or self.due(clock):  # due: a state that was saved right after a cut has been loaded
            torch._foreach_zero_(scores)
            self.used = False
        for layer, grad in weights.grads.items():
            scores[layer].add_((grad * values[layer]).square_())
        super().after_backward(weights, clock, lr)
