"""S-STE: Continuous Pruning Function for Efficient 2:4 Sparse Pre-training. Hu et al., 2024 (arXiv:2409.09099).

Forward sees β · sign(w) · (|w| − t), where t is the largest removed magnitude of each group: no weight jumps when the mask
changes. β makes up for the lost magnitude; it is fixed per layer before training: β = ⟨w, w̃⟩ / ⟨w̃, w̃⟩ for the soft weights w̃.
Every latent weight receives the gradient of the pruned model. Made for 2:4.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from optg.core.clock import Clock
from optg.core.passes.reference import SoftThreshold
from optg.core.probe import Probe
from optg.core.weights import SparseWeights
from optg.methods.soft import Soft


@dataclass
class SSTE(Soft):
    paper: ClassVar[str] = "Hu et al. 2024"

    schedule: str = "constant"
    every: int | str = 1
    budget: str = "uniform"
    power: float = 1.0
    theta: float | None = 1.0

    def prepare(self, weights: SparseWeights, clock: Clock, probe: Probe) -> None:
        self.scales = weights.values[0].new_ones(len(weights.names), dtype=weights.state_dtype)
        super().prepare(weights, clock, probe)
        self.state["scales"] = list(self.scales)
        weights.measure_ratios(weights.values, self.thresholds)
        products = [self.products(weights, layer) for layer in range(len(weights.names))]
        whole, soft = weights.mask_set.total(torch.stack(products)).unbind(1)
        self.scales.copy_((whole / soft).nan_to_num(nan=1.0))

    def products(self, weights: SparseWeights, layer: int) -> Tensor:
        """Return ⟨w, w̃⟩ and ⟨w̃, w̃⟩ of a layer."""
        value = weights.values[layer]
        soft = self.effective(weights, layer, value) * weights.masks[layer]
        return torch.stack([(value * soft).sum(), soft.square().sum()]).to(self.scales)

    def soft_threshold(self) -> SoftThreshold | None:
        return SoftThreshold(self.thresholds, self.power, scales=self.scales)

    def effective(self, weights: SparseWeights, layer: int, latent: Tensor) -> Tensor:
        return super().effective(weights, layer, latent) * self.scales[layer].to(latent)
