"""Sparse Training via Boosting Pruning Plasticity with Neuroregeneration (GraNet). Liu et al., 2021 (arXiv:2106.10404).

RigL on a shrinking budget. From a random mask at half density the sparsity rises on the cubic schedule: the smallest weights
of all layers go, then each layer exchanges weights by the dense gradient. Exchanges continue until training ends, as in the
authors' code.
"""

from dataclasses import dataclass
from typing import ClassVar

from optg.core.clock import Clock
from optg.core.probe import Probe
from optg.core.weights import SparseWeights
from optg.methods.rigl import RigL


@dataclass
class GraNet(RigL):
    paper: ClassVar[str] = "Liu et al. 2021"
    needs_all_gradients: ClassVar[bool] = True

    schedule: str = "cubic"
    initial: float = 0.5  # the sparsity at which the schedule begins
    end: float = 0.5
    every: int | str = 1000
    budget: str = "global"
    fraction: float = 0.5
    until: float = 1.0  # where exchanges end, as a share of training; the sparsity reaches the target at `end`

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.end <= self.until <= 1:
            raise ValueError(f"until is {self.until}; expected at least `end`, {self.end}, and at most 1")

    def prepare(self, weights: SparseWeights, clock: Clock, probe: Probe) -> None:
        weights.cut(weights.random(self.seed), self.sparsity(weights, clock), "erk")

    def last_exchange(self) -> float:
        return self.until

    def due(self, clock: Clock) -> bool:
        late = self.last_cut(clock) < clock.step <= self.until * clock.total and self.is_regular(clock)
        return late or super().due(clock)
