"""Picking Winning Tickets Before Training by Preserving Gradient Flow (GraSP). Wang et al., 2020 (arXiv:2002.07376).

Before training, remove the weights whose removal reduces the gradient flow ‖g‖² least: those with the largest −(H·g)·w, where
H is the Hessian. The loss is computed from outputs divided by a temperature. The batches should hold some images of each
class (the paper: ten), because the output of a class that never appears keeps no weight.
"""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from optg.core.probe import Probe
from optg.core.weights import SparseWeights
from optg.methods.snip import SNIP


@dataclass
class GraSP(SNIP):
    paper: ClassVar[str] = "Wang et al. 2020"

    temperature: float = 200.0  # the outputs are divided by it

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.temperature > 0:
            raise ValueError(f"temperature is {self.temperature}; expected above 0")

    def saliency(self, weights: SparseWeights, probe: Probe) -> list[Tensor]:
        products = probe.hessian_gradients(weights, self.batches, self.temperature)
        return [h * w for h, w in zip(products, weights.values)]  # the largest −(H·g)·w go: the smallest of this
