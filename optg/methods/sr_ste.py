"""Learning N:M Fine-grained Structured Sparse Neural Networks From Scratch (SR-STE). Zhou et al., 2021 (arXiv:2102.04010).

Cut by magnitude at every step and give every latent weight the gradient of the pruned model. The gradient of a dormant weight
gets an extra decay, g ← g + λ · w, which keeps the mask from changing back and forth. Made for N:M.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from optg.core.clock import Clock
from optg.core.weights import SparseWeights
from optg.methods.dnw import DNW


@dataclass
class SRSTE(DNW):
    paper: ClassVar[str] = "Zhou et al. 2021"

    decay: float = 2e-4  # λ: decay of dormant weights, besides the optimizer's weight decay

    def after_backward(self, weights: SparseWeights, clock: Clock, lr: list[Tensor]) -> None:
        super().after_backward(weights, clock, lr)
        if grads := weights.grads:
            dormant = [weights.values[i].masked_fill(weights.masks[i], 0.0) for i in grads]
            torch._foreach_add_(list(grads.values()), dormant, alpha=self.decay)
