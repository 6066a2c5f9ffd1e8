"""Rigging the Lottery: Making All Tickets Winners. Evci et al., 2020 (arXiv:1911.11134).

Train sparse from the first step. Every so many steps, in each layer, drop the share f(t) of the kept weights that have the
least magnitude and grow as many where the dense gradient is largest: f(t) = fraction · (1 + cos(πt / T_end)) / 2.
Grown weights start at 0.
"""

import math
import warnings
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from optg.core.clock import Clock
from optg.core.probe import Probe
from optg.core.schedules import ramp
from optg.core.weights import SparseWeights
from optg.methods.base import Gradual


@dataclass
class RigL(Gradual):
    paper: ClassVar[str] = "Evci et al. 2020"

    schedule: str = "constant"
    every: int | None = 100
    budget: str = "erk"
    fraction: float = 0.3  # of the kept weights, dropped and grown at the first exchange
    hold: bool = False  # leave all weights as they are in the step of an exchange, as in the paper
    seed: int = 0  # of the first mask

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.fraction <= 1:
            raise ValueError(f"fraction is {self.fraction}; expected a share of the kept weights, from 0 to 1")

    def prepare(self, weights: SparseWeights, clock: Clock, probe: Probe) -> None:
        weights.cut(weights.random(self.seed), self.sparsity(weights, clock), self.budget)
        if (first := self.period(clock)) >= (last := self.last_exchange() * clock.total) and self.schedule == "constant":
            warnings.warn(
                f"{type(self).__name__} exchanges weights every {first} steps until step {last:.0f} of {clock.total}: never. "
                "Its random mask will stay; give it a smaller `every`",
                stacklevel=5,
            )

    def after_backward(self, weights: SparseWeights, clock: Clock, lr: list[Tensor]) -> None:
        if self.due(clock) and not (weights.skipped is not None and weights.skipped):  # a sync, on these steps alone
            sparsity = self.sparsity(weights, clock)
            if self.schedule != "constant" and sparsity > weights.sparsity:  # a shrinking budget: the smallest go first
                self.cut(weights, sparsity)
                weights.show_effective()  # what comes back at once starts at 0 too
            share = self.fraction * (1 + math.cos(math.pi * ramp(clock, 0, self.last_exchange()))) / 2
            weights.exchange(share, self.grow_scores(weights, clock))
            if self.hold:
                weights.optimizer.zero_grad()  # an optimizer passes over what has no gradient
        super().after_backward(weights, clock, lr)

    def last_exchange(self) -> float:
        """Of training: where exchanges end."""
        return self.end

    def capturable(self, clock: Clock) -> bool:
        return not self.due(clock)

    def after_update(self, weights: SparseWeights, clock: Clock) -> None:
        """Masks change in `after_backward`, where the dense gradient is at hand."""

    def grow_scores(self, weights: SparseWeights, clock: Clock) -> dict[int, Tensor]:
        return {layer: grad.abs() for layer, grad in weights.grads.items()}
