"""What's Hidden in a Randomly Weighted Neural Network? (edge-popup). Ramanujan et al., 2020 (arXiv:1911.13299).

Weights stay as they are, random or pre-trained; only a score for each is trained, by the straight-through gradient
dL/d(w⊙m) · w, and each layer shows the weights whose scores are largest in magnitude, chosen anew at every step.
"""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from optg.clock import Clock
from optg.methods.base import Gradual
from optg.probe import Probe
from optg.weights import SparseWeights


@dataclass
class Supermask(Gradual):
    paper: ClassVar[str] = "Ramanujan et al. 2020"
    keeps_pruned: ClassVar[bool] = True
    keeps_cutting: ClassVar[bool] = True
    freezes_weights: ClassVar[bool] = True

    schedule: str = "constant"
    every: int | None = 1
    budget: str = "uniform"
    signed_constant: bool = False  # first replace each weight by its sign times the layer's standard deviation
    momentum: float = 0.9  # of the scores
    decay: float = 1e-4  # of the scores
    seed: int = 0  # of the first scores

    def prepare(self, weights: SparseWeights, clock: Clock, probe: Probe) -> None:
        bounds = [(shape[0] / shape.numel()) ** 0.5 for shape in weights.shapes]  # 1 / √fan-in
        first = [(2 * r - 1).to(weights.state_dtype) * bound for r, bound in zip(weights.random(self.seed), bounds)]
        self.state = {"scores": first, "momenta": weights.zeros_like()}
        if self.signed_constant:
            for value, bound in zip(weights.values, bounds):
                value.copy_(value.sign() * bound * (2 / (1 - weights.target)) ** 0.5)  # kaiming's, for the kept share
        super().prepare(weights, clock, probe)

    def scores(self, weights: SparseWeights) -> list[Tensor]:
        return [score.abs() for score in self.layers("scores")]

    def after_backward(self, weights: SparseWeights, clock: Clock, lr: list[Tensor]) -> None:
        values, scores, momenta = weights.values, self.layers("scores"), self.layers("momenta")
        for i, grad in weights.grads.items():
            toward = grad * values[i] * scores[i].sign() + self.decay * scores[i]
            keep = 0.0 if weights.skipped is None else weights.skipped.to(toward.dtype)
            momenta[i].mul_(self.momentum + (1 - self.momentum) * keep).add_(toward * (1 - keep))
            scores[i].sub_(lr[i] * momenta[i])
            weights.parameters[i].grad = None  # an optimizer passes over what has no gradient: no step, no decay
