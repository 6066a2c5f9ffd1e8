"""What's Hidden in a Randomly Weighted Neural Network? (edge-popup). Ramanujan et al., 2020 (arXiv:1911.13299).

The weights, random or pre-trained, never change. Only a score per weight is trained, by the straight-through gradient
dL/d(w⊙m) · w, and at every step each layer keeps the weights with the largest absolute scores.

On trained weights the first mask should keep the largest weights (`first="magnitude"`), as in Lottery Jackpots Exist in
Pre-trained Models, Zhang et al., 2021 (arXiv:2104.08700): a random mask may let no signal pass, and then no score learns.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from optg.core.clock import Clock
from optg.core.probe import Probe
from optg.core.weights import SparseWeights
from optg.methods.base import Gradual, refuse_unknown
from optg.methods.scores import ScoreSGD


@dataclass
class Supermask(Gradual):
    paper: ClassVar[str] = "Ramanujan et al. 2020"
    keeps_pruned: ClassVar[bool] = True
    needs_minimization: ClassVar[bool] = True
    keeps_cutting: ClassVar[bool] = True

    schedule: str = "constant"
    every: int | str = 1
    budget: str = "uniform"
    first: str = "random"  # first scores: random, or magnitude (1 for the largest weights within the budget, 0.99 for the rest)
    signed_constant: bool = False  # replace each weight by its sign times the layer's standard deviation before training
    momentum: float = 0.9  # momentum of the scores
    decay: float = 1e-4  # weight decay of the scores
    seed: int = 0  # seed of the first scores

    def __post_init__(self) -> None:
        super().__post_init__()
        refuse_unknown("first", self.first, ["random", "magnitude"])

    def prepare(self, weights: SparseWeights, clock: Clock, probe: Probe) -> None:
        bounds = [(count / shape.numel()) ** 0.5 for count, shape in zip(weights.neurons, weights.shapes)]  # 1 / √fan-in
        if self.first == "magnitude":
            weights.cut(super().scores(weights), self.sparsity(weights, clock), self.budget)
            first = [torch.where(mask, 1.0, 0.99).to(weights.state_dtype) for mask in weights.masks]
        else:
            first = [(2 * r - 1).to(weights.state_dtype) * bound for r, bound in zip(weights.random(self.seed), bounds)]
        self.sgd = ScoreSGD(first, self.momentum)
        self.state = {"scores": self.sgd.scores, "momenta": self.sgd.momenta}
        if self.signed_constant:
            for value, bound in zip(weights.values, bounds):
                value.copy_(value.sign() * bound * (2 / (1 - weights.target)) ** 0.5)  # kaiming init for the kept share
        super().prepare(weights, clock, probe)

    def scores(self, weights: SparseWeights) -> list[Tensor]:
        return list(torch._foreach_abs(self.sgd.scores))

    def reads_removed(self, clock: Clock) -> bool:
        return True

    def after_backward(self, weights: SparseWeights, clock: Clock, lr: list[Tensor]) -> None:
        if not (grads := weights.grads):
            return
        values = weights.values
        values, scores = [values[i] for i in grads], [self.sgd.scores[i] for i in grads]
        directions = torch._foreach_mul(torch._foreach_mul(list(grads.values()), values), torch._foreach_sign(scores))
        torch._foreach_add_(directions, scores, alpha=self.decay)
        self.sgd.step(weights, list(grads), list(directions), lr)
        for i in grads:
            weights.parameters[i].grad = None  # optimizers skip parameters without a gradient: no step, no decay
