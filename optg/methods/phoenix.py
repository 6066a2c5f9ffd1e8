"""phoenix: latent magnitude as a supermask score that may cross zero. A method of this project; see docs/phoenix.md.

It builds on Feather (soft threshold, straight-through gradients) and on HAM (multiplicative steps). Every 16 steps a global cut
keeps the largest latent magnitudes, while the sparsity rises on a cubic schedule from 0.06 to 0.7 of training. Forward sees
w · (1 − (t/|w|)³)^(1/3). Dormant weights receive a share θ of the sparse model's gradient, so they can come back, also with the
other sign. It is meant for a learning rate that is held for the first half of training and then falls on a cosine.

A neuron that has lost all its weights rests: they receive no gradient until a cut brings one of them back. Behind a batch norm
that gradient would be a few hundred times as large as that of other neurons, and weights that have learned nothing would
outgrow those that have.

With `reopen`, a random share of the steps uses a lower threshold in forward, t times a random number, so that dormant weights
near the cut take part for real. Such steps update no batch-norm statistics.
"""

from dataclasses import dataclass, field
from random import Random
from typing import ClassVar

from optg.core.clock import Clock
from optg.core.passes.reference import SoftThreshold
from optg.methods.soft import Soft

LAST_TRIAL = 0.8  # no step of the last fifth of training reopens weights


@dataclass
class Phoenix(Soft):
    paper: ClassVar[str] = "this project"
    rate_schedule: ClassVar[str | None] = "hold"
    added: ClassVar[dict[str, float]] = Soft.added | {"rest_dead": False}

    ham: float = field(default=50.0, kw_only=True)
    start: float = 0.06
    end: float = 0.7
    rest_dead: bool = True  # output neurons that have lost all their weights receive no gradient
    reopen: float = 0.0  # share of the steps, until the last fifth of training, in which forward uses a lower threshold
    seed: int = 0  # seed of these steps and their thresholds

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.reopen < 1:
            raise ValueError(f"reopen is {self.reopen}; expected a share of the steps, at least 0 and below 1")

    @property
    def rests_dead(self) -> bool:
        return self.rest_dead

    @property
    def tries_dormant(self) -> bool:
        return self.reopen > 0

    def trial_threshold(self, clock: Clock) -> SoftThreshold | None:
        if not self.tries_dormant or clock.progress >= LAST_TRIAL:
            return None
        random = Random(f"{self.seed} {clock.step}")  # a function of the step: resumes, and is the same on every rank
        chosen, factor = random.random() < self.reopen, random.random()
        return SoftThreshold(self.thresholds * factor, self.power) if chosen else None
