"""Rigging the Lottery: Making All Tickets Winners. Evci et al., 2020 (arXiv:1911.11134).

Train sparse from the first step. Every few steps, each layer drops the share f(t) of its kept weights of least magnitude and
grows as many, at 0, where the dense gradient is largest: f(t) = fraction · (1 + cos(πt / T_end)) / 2.
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
    grows_by_gradient: ClassVar[bool] = True
    regrows_at_zero: ClassVar[bool] = True
    renamed: ClassVar[dict[str, str]] = {"hold": "skip_update_on_exchange"}

    schedule: str = "constant"
    every: int | str = 100
    budget: str = "erk"
    fraction: float = 0.3  # share of the kept weights that the first exchange drops and grows
    skip_update_on_exchange: bool = False  # leave all weights unchanged in the step of an exchange, as in the paper
    seed: int = 0  # seed of the first mask

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.fraction <= 1:
            raise ValueError(f"fraction is {self.fraction}; expected a share of the kept weights, from 0 to 1")

    def prepare(self, weights: SparseWeights, clock: Clock, probe: Probe) -> None:
        weights.cut(weights.random(self.seed), self.sparsity(weights, clock), self.budget)
        if (first := self.period(clock)) >= (last := self.last_exchange() * clock.total) and self.schedule == "constant":
            warnings.warn(
                f"{type(self).__name__} exchanges weights every {first} steps until step {last:.0f} of {clock.total}: never. "
                "Its random mask stays as it is; use a smaller `every`",
                stacklevel=5,
            )

    def exchange(self, weights: SparseWeights, clock: Clock) -> None:
        sparsity = self.sparsity(weights, clock)
        if (
            self.schedule != "constant" and max(weights.missing_zeros(sparsity)) > 0
        ):  # a shrinking budget: the smallest weights go first
            self.cut(weights, sparsity)
            weights.show_effective()  # a weight that is cut and grown in one step starts at 0 too
        share = self.fraction * (1 + math.cos(math.pi * ramp(clock, 0, self.last_exchange()))) / 2
        weights.exchange(share, self.grow_scores(weights, clock))
        if self.skip_update_on_exchange:
            weights.optimizer.zero_grad()  # optimizers skip parameters without a gradient

    def last_exchange(self) -> float:
        """Return when exchanges end, as a share of training."""
        return self.end

    def grow_scores(self, weights: SparseWeights, clock: Clock) -> dict[int, Tensor]:
        return {layer: grad.abs() for layer, grad in weights.grads.items()}
