"""The Lottery Ticket Hypothesis: iterative magnitude pruning (arXiv:1803.03635), with rewinding as in arXiv:1912.05671.

Train, remove a share of the remaining weights by magnitude, return to the weights and optimizer state of the beginning, and
train again, until the target is reached. The epochs given to `sparsify` hold all cycles, in equal parts. The learning rate
should restart at its peak with each cycle, even if `rewind` returns to a later point:
`CosineAnnealingWarmRestarts(optimizer, T_0=sparsifier.method.cycle(clock))`, stepped with every optimizer step.
"""

import math
from dataclasses import dataclass
from typing import ClassVar

from optg.core.clock import Clock, cycle_length
from optg.core.optimizer_state import restore, snapshot
from optg.core.probe import Probe
from optg.core.prunable import unwrap
from optg.core.weights import SparseWeights
from optg.methods.base import Method


@dataclass
class IMP(Method):
    paper: ClassVar[str] = "Frankle & Carbin 2019"
    revives: ClassVar[bool] = False

    fraction: float = 0.2  # share of the kept weights that each cycle removes at its end
    rewind: float = 0.0  # the point of a cycle to return to, as a share of the cycle

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.fraction < 1 or not 0 <= self.rewind <= 1:
            raise ValueError(f"fraction is {self.fraction} (expected above 0 and below 1), rewind is {self.rewind} (0 to 1)")

    def prepare(self, weights: SparseWeights, clock: Clock, probe: Probe) -> None:
        self.model, self.target = unwrap(probe.model), weights.target
        if clock.total < 2 * self.cycles:
            fit = f"{self.cycles} cycles of training do not fit into {clock.total} steps; expected at least 2 steps each"
            raise ValueError(f"{fit}. Train longer, or use a larger `fraction`")
        self.state = {"model": {}, "optimizer": {}}
        self.remember(weights, clock)

    @property
    def cycles(self) -> int:
        """The number of times the model is trained."""
        prunings = math.log(1 - self.target) / math.log(1 - self.fraction)
        return math.ceil(prunings - 1e-9) + 1  # the tolerance is for targets that a whole number of prunings meets exactly

    def cycle(self, clock: Clock) -> int:
        """Return the steps in a cycle; the last one may be shorter or longer."""
        return cycle_length(clock.total, self.cycles)

    def target_step(self, clock: Clock) -> int:
        return (self.cycles - 1) * self.cycle(clock)

    def capturable(self, clock: Clock) -> bool:
        return False

    def after_update(self, weights: SparseWeights, clock: Clock) -> None:
        self.remember(weights, clock)
        length = self.cycle(clock)
        done = clock.step // length
        if clock.step % length == 0 and done < self.cycles:
            last = done == self.cycles - 1
            self.cut(weights, weights.target if last else 1 - (1 - self.fraction) ** done)
            restore(self.model, weights.optimizer, self.tensors("model"), self.tensors("optimizer"))

    def remember(self, weights: SparseWeights, clock: Clock) -> None:
        if clock.step == round(self.rewind * self.cycle(clock)):
            self.state["model"], self.state["optimizer"] = snapshot(self.model, weights.optimizer)
