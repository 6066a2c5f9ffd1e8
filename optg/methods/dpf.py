"""Dynamic Model Pruning with Feedback (DPF). Lin et al., 2020 (arXiv:2006.07253).

Cut by magnitude every few steps, and give every latent weight, dormant ones too, the gradient of the pruned model: weights
that were removed in error grow back.
"""

from dataclasses import dataclass
from typing import ClassVar

from optg.methods.base import Gradual


@dataclass
class DPF(Gradual):
    paper: ClassVar[str] = "Lin et al. 2020"
    keeps_pruned: ClassVar[bool] = True
    keeps_cutting: ClassVar[bool] = True

    every: int | str = 16

    @property
    def dormant_gradient(self) -> float:
        return 1.0
