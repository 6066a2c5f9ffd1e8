"""SET: adaptive sparse connectivity inspired by network science. Mocanu et al., 2018 (arXiv:1707.04780).

RigL with random growth: no gradient is used.
"""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from optg.core.clock import Clock
from optg.core.weights import SparseWeights
from optg.methods.rigl import RigL


@dataclass
class SET(RigL):
    paper: ClassVar[str] = "Mocanu et al. 2018"

    every: int | str = 1000
    end: float = 1.0
    fraction: float = 0.5

    def grow_scores(self, weights: SparseWeights, clock: Clock) -> dict[int, Tensor]:
        numbers = weights.random(self.seed * 1_000_003 + clock.step)
        return {layer: numbers[layer] for layer in weights.grads}
