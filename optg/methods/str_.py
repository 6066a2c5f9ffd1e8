"""Soft Threshold Weight Reparameterization for Learnable Sparsity (STR). Kusupati et al., 2020 (arXiv:2002.03231).

Forward sees sign(w) · relu(|w| − σ(s)), with a threshold s learned per layer. Weight decay pulls s upwards from far below 0:
its initial value and its decay decide the final sparsity, and the target has no influence.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from optg.core.clock import Clock
from optg.core.passes.reference import SoftThreshold
from optg.core.probe import Probe
from optg.core.weights import SparseWeights
from optg.methods.base import Method
from optg.methods.scores import ScoreSGD


@dataclass
class STR(Method):
    paper: ClassVar[str] = "Kusupati et al. 2020"
    keeps_pruned: ClassVar[bool] = True
    needs_minimization: ClassVar[bool] = True
    learns_sparsity: ClassVar[bool] = True
    single_weights: ClassVar[str] = "it learns a threshold for single weights"

    initial: float = -200.0  # s before training
    decay: float | None = None  # weight decay of s; None: as for the weights
    momentum: float = 0.9  # momentum of s

    def prepare(self, weights: SparseWeights, clock: Clock, probe: Probe) -> None:
        self.s = weights.values[0].new_full((len(weights.names),), self.initial, dtype=weights.state_dtype)
        self.sgd = ScoreSGD([self.s], self.momentum)
        self.state = {"s": list(self.s), "momenta": list(self.sgd.momenta[0])}
        self.cut(weights, weights.target)

    def effective(self, weights: SparseWeights, layer: int, latent: Tensor) -> Tensor:
        return latent.sign() * (latent.abs() - self.layers("s")[layer].sigmoid()).relu()

    def soft_threshold(self) -> SoftThreshold | None:
        return SoftThreshold(self.s.sigmoid(), 1.0)

    def after_backward(self, weights: SparseWeights, clock: Clock, lr: list[Tensor]) -> None:
        sums, share = weights.sum_signed_gradients(), self.s.sigmoid()
        decays = weights.group_option("weight_decay", 0.0) if self.decay is None else [self.decay]
        decay = decays[0] if len(set(decays)) == 1 else self.s.new_tensor(decays)
        self.sgd.update(weights, self.sgd.momenta, [-(sums * share * (1 - share))], [decay * self.s])
        self.s.sub_(torch.stack(lr) * self.sgd.momenta[0])

    def after_update(self, weights: SparseWeights, clock: Clock) -> None:
        self.cut(weights, weights.target)

    def cut(self, weights: SparseWeights, sparsity: float) -> None:
        weights.keep_above(self.s.sigmoid())
