"""Soft Threshold Weight Reparameterization for Learnable Sparsity (STR). Kusupati et al., 2020 (arXiv:2002.03231).

Forward sees sign(w) · relu(|w| − σ(s)), with one threshold s learned for each layer. Decay pulls s, which starts far below 0,
upwards: initial value and decay set the sparsity that training arrives at; the one asked for has no say.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from optg.core.clock import Clock
from optg.core.probe import Probe
from optg.core.weights import Soft, SparseWeights
from optg.methods.base import Method


@dataclass
class STR(Method):
    paper: ClassVar[str] = "Kusupati et al. 2020"
    keeps_pruned: ClassVar[bool] = True
    descends: ClassVar[bool] = True
    learns_sparsity: ClassVar[bool] = True

    initial: float = -200.0  # s before training
    decay: float | None = None  # of s; None: the weight decay of the weights
    momentum: float = 0.9  # of s

    def prepare(self, weights: SparseWeights, clock: Clock, probe: Probe) -> None:
        self.s = weights.values[0].new_full((len(weights.names),), self.initial, dtype=weights.state_dtype)
        self.momenta = torch.zeros_like(self.s)
        self.state = {"s": list(self.s), "momenta": list(self.momenta)}
        self.cut(weights, weights.target)

    def effective(self, weights: SparseWeights, layer: int, latent: Tensor) -> Tensor:
        return latent.sign() * (latent.abs() - self.layers("s")[layer].sigmoid()).relu()

    def after_backward(self, weights: SparseWeights, clock: Clock, lr: list[Tensor]) -> None:
        toward, groups = weights.sum_signed_gradients(), weights.optimizer.param_groups
        decays = [groups[group].get("weight_decay", 0.0) if self.decay is None else self.decay for group in weights.groups]
        share, decay = self.s.sigmoid(), decays[0] if len(set(decays)) == 1 else self.s.new_tensor(decays)
        moved = self.momentum * self.momenta - toward * share * (1 - share) + decay * self.s
        self.momenta.copy_(moved if weights.skipped is None else torch.where(weights.skipped, self.momenta, moved))
        self.s.sub_(torch.stack(lr) * self.momenta)

    def after_update(self, weights: SparseWeights, clock: Clock) -> None:
        self.cut(weights, weights.target)

    def soft(self) -> Soft | None:
        return Soft(self.s.sigmoid(), 1.0)

    def cut(self, weights: SparseWeights, sparsity: float) -> None:
        weights.keep_above(self.s.sigmoid())
