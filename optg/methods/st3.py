"""Are Straight-Through gradients and Soft-Thresholding all you need for Sparse Training? (ST-3, arXiv:2212.01076).

Feather's scheme with the soft threshold sign(w) · (|w| − t) and a factor per filter that makes up for the magnitude that the
mask removes. Thresholds move at every step. ST-3σ ranks |w| · √(sum of the layer's dimensions), which evens out the scales
of layers and needs fewer FLOPs.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from optg.core.clock import Clock
from optg.core.passes.reference import SoftThreshold, power_threshold
from optg.core.probe import Probe
from optg.core.weights import SparseWeights
from optg.methods.soft import Soft


@dataclass
class ST3(Soft):
    paper: ClassVar[str] = "Vanderschueren & De Vleeschouwer 2023"

    start: float = 0.05
    end: float = 0.5
    every: int | str = 1
    power: float = 1.0
    theta: float | None = 1.0
    rescale: bool = True  # multiply each filter by a factor that makes up for its removed weights

    def prepare(self, weights: SparseWeights, clock: Clock, probe: Probe) -> None:
        self.divisors = weights.values[0].new_tensor(self.scales(weights), dtype=weights.state_dtype)
        super().prepare(weights, clock, probe)

    def scales(self, weights: SparseWeights) -> list[float]:
        """Return the factor of each layer's magnitudes before they are ranked."""
        return [1.0 for _ in weights.shapes]

    def scores(self, weights: SparseWeights) -> list[Tensor]:
        return list(torch._foreach_mul(super().scores(weights), self.scales(weights)))

    def cut(self, weights: SparseWeights, sparsity: float) -> None:
        super().cut(weights, sparsity)
        self.thresholds.div_(self.divisors)

    def soft_threshold(self) -> SoftThreshold | None:
        return SoftThreshold(self.thresholds, self.power, self.rescale)

    def effective(self, weights: SparseWeights, layer: int, latent: Tensor) -> Tensor:
        t = self.layers("thresholds")[layer]
        soft = power_threshold(latent, t, self.power, weights.threshold_ratio(layer))
        if not self.rescale:
            return soft
        magnitude = latent.abs()
        kept = weights.neuron_means(layer, magnitude * weights.masks[layer])
        kept = kept / (weights.neuron_means(layer, magnitude) + 1e-12)
        return (soft * (1.01 / (kept + 0.01))).where(t > 0, latent)


@dataclass
class ST3Sigma(ST3):
    def scales(self, weights: SparseWeights) -> list[float]:
        return [sum(shape) ** 0.5 for shape in weights.shapes]
