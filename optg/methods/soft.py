"""What methods with a soft threshold share: Feather, ST-3 and phoenix.

Forward sees sign(w) · (|w|ᵖ − tᵖ)^(1/p) above a magnitude threshold t that each cut sets, and 0 below it. Every latent weight
receives the gradient of the sparse model, dormant ones a share θ of it.
"""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from optg.core.clock import Clock
from optg.core.passes.reference import SoftThreshold, power_threshold
from optg.core.probe import Probe
from optg.core.weights import SparseWeights
from optg.methods.base import Gradual


@dataclass
class Soft(Gradual):
    keeps_pruned: ClassVar[bool] = True
    keeps_cutting: ClassVar[bool] = True

    every: int | str = 16
    power: float = 3.0  # p: 1 is the soft threshold, ∞ the hard one
    theta: float | None = None  # share of the gradient that dormant weights receive; None: 0.5 above 95 % sparsity, else 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.power > 0:
            raise ValueError(f"power is {self.power}; expected more than 0")

    def prepare(self, weights: SparseWeights, clock: Clock, probe: Probe) -> None:
        self.share = self.theta if self.theta is not None else 0.5 if weights.target > 0.95 else 1.0
        self.thresholds = weights.values[0].new_zeros(len(weights.names), dtype=weights.state_dtype)
        self.state = {"thresholds": list(self.thresholds)}
        super().prepare(weights, clock, probe)

    @property
    def dormant_gradient(self) -> float:
        return self.share

    def due(self, clock: Clock) -> bool:
        return super().due(clock) or clock.step == clock.total  # kept weights may have fallen below the last threshold

    def cut(self, weights: SparseWeights, sparsity: float) -> None:
        thresholds = weights.cut(self.ranked(weights), sparsity, self.budget)
        self.thresholds.copy_(thresholds.clamp(min=0.0))

    def soft_threshold(self) -> SoftThreshold | None:
        return SoftThreshold(self.thresholds, self.power)

    def effective(self, weights: SparseWeights, layer: int, latent: Tensor) -> Tensor:
        return power_threshold(latent, self.layers("thresholds")[layer], self.power, weights.threshold_ratio(layer))
