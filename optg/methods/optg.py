"""OptG: Optimizing Gradient-driven Criteria in Network Sparsity. Zhang et al., 2022 (arXiv:2201.12826).

Weights and mask scores are trained together. Each step adds the gradient criterion of the sparse model to the scores, for
kept and removed weights alike. Each epoch keeps the top scores of all layers together, while the sparsity rises slowly:

    Eq. 10   score ← score − η_m · dL/d(w⊙m) · w      (with momentum; w is the latent weight, also where the mask is 0)
    Eq. 15   P_k = P / (1 + exp(−α(k − τ/2)))
    Eq. 16   η_m,k = η_w,k / (1 + exp(−α(k − τ/2)))

A removed weight comes back with the value it had.
"""

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor

from optg.core.clock import Clock
from optg.core.probe import Probe
from optg.core.schedules import default_alpha, logistic
from optg.core.weights import SparseWeights
from optg.methods.base import Gradual, refuse_unknown
from optg.methods.scores import ScoreSGD


@dataclass
class OptG(Gradual):
    paper: ClassVar[str] = "Zhang et al. 2022"
    keeps_pruned: ClassVar[bool] = True
    needs_minimization: ClassVar[bool] = True

    schedule: str = "sigmoid"
    end: float = 1.0
    alpha: float | None = None  # steepness of the sigmoid; None: 0.5, or 40 / epochs in runs shorter than 80 epochs
    # learning rate of the scores: sparsity (Eq. 16), weight (as for the weights), or a number
    score_lr: Literal["sparsity", "weight"] | float = "sparsity"
    momentum: float = 0.9  # momentum of the scores
    dormant_decay: bool = True  # momentum and weight decay keep moving dormant weights

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.momentum < 1:
            raise ValueError(f"momentum is {self.momentum}; expected at least 0 and below 1")
        if isinstance(self.score_lr, str):
            refuse_unknown("score_lr", self.score_lr, ("sparsity", "weight"))
        else:
            self.score_lr = float(self.score_lr)
            if not 0 < self.score_lr < math.inf:
                raise ValueError(f"score_lr is {self.score_lr}; expected more than 0, 'sparsity' or 'weight'")

    @property
    def freezes_dormant(self) -> bool:
        return not self.dormant_decay

    @property
    def least_epochs(self) -> int:
        return 2 if self.every_epochs else 1  # the first cut is at the start of the second

    def prepare(self, weights: SparseWeights, clock: Clock, probe: Probe) -> None:
        if clock.epochs < self.least_epochs and weights.target:
            raise ValueError("OptG cuts its first mask after the first step; training has a single step, expected at least 2")
        self.warn_of_a_jump(weights, clock)
        self.sgd = ScoreSGD(weights.zeros_like(), self.momentum)
        self.state = {"scores": self.sgd.scores, "momenta": self.sgd.momenta}
        self.factor, self.epoch = self.sgd.scores[0].new_zeros(()), 0  # Eq. 16: η_m / η_w, and the epoch it is of

    def set_time(self, clock: Clock) -> None:
        if clock.epoch != self.epoch:
            self.epoch = clock.epoch
            self.factor.fill_(self.rate_at(clock))

    def rate_at(self, clock: Clock) -> float:
        alpha = self.alpha or default_alpha(clock.epochs)
        return logistic(alpha * (clock.epoch - clock.epochs / 2)) if self.score_lr == "sparsity" else 1.0

    def metrics(self, clock: Clock, lr: float) -> dict[str, float]:
        return {"score_lr": self.rate_at(clock) * (self.score_lr if isinstance(self.score_lr, float) else lr)}

    def scores(self, weights: SparseWeights) -> list[Tensor]:
        return self.sgd.scores

    def reads_removed(self, clock: Clock) -> bool:
        return True

    def after_backward(self, weights: SparseWeights, clock: Clock, lr: list[Tensor]) -> None:
        if isinstance(self.score_lr, float):
            lr = [η.ne(0) * self.score_lr for η in lr]
        rates = {η: η * self.factor.to(η.device) for η in set(lr)}
        self.sgd.add_criterion(weights, [rates[η] for η in lr])
