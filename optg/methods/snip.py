"""SNIP: Single-shot Network Pruning based on Connection Sensitivity. Lee et al., 2019 (arXiv:1810.02340).

Before training, keep the weights whose removal would change the loss most, to first order: score = |dL/dw · w|. All layers
are ranked together, so a layer may lose every weight; a warning names it.
"""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from optg.core.clock import Clock
from optg.core.probe import Probe
from optg.core.weights import SparseWeights
from optg.methods.base import LAYER_BUDGETS, Method, refuse_unknown


@dataclass
class SNIP(Method):
    paper: ClassVar[str] = "Lee et al. 2019"
    when: ClassVar[str] = "before"
    revives: ClassVar[bool] = False

    batches: int = 1  # number of batches whose gradient is used
    budget: str = "global"  # weights each layer keeps: global (by score), uniform, erk, magnitude (GS: by global magnitude)

    def __post_init__(self) -> None:
        super().__post_init__()
        refuse_unknown("budget", self.budget, LAYER_BUDGETS)
        if self.batches < 1:
            raise ValueError(f"batches is {self.batches}; expected at least 1")

    def prepare(self, weights: SparseWeights, clock: Clock, probe: Probe) -> None:
        weights.cut(self.saliency(weights, probe), weights.target, self.budget)

    def saliency(self, weights: SparseWeights, probe: Probe) -> list[Tensor]:
        return [(g * w).abs() for g, w in zip(probe.gradients(weights, self.batches), weights.values)]
