"""What's Hidden in a Randomly Weighted Neural Network? (edge-popup). Ramanujan et al., 2020 (arXiv:1911.13299).

Weights stay as they are, random or pre-trained; only a score for each is trained, by the straight-through gradient
dL/d(w⊙m) · w, and each layer shows the weights whose scores are largest in magnitude, chosen anew at every step.

On trained weights the first mask should be that of the largest weights (`first="magnitude"`), as in Lottery Jackpots Exist in
Pre-trained Models, Zhang et al., 2021 (arXiv:2104.08700): through a random one nothing may pass, and then no score learns.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from optg.core.clock import Clock
from optg.core.probe import Probe
from optg.core.weights import SparseWeights
from optg.methods.base import Gradual, refuse_unknown


@dataclass
class Supermask(Gradual):
    paper: ClassVar[str] = "Ramanujan et al. 2020"
    keeps_pruned: ClassVar[bool] = True
    descends: ClassVar[bool] = True
    keeps_cutting: ClassVar[bool] = True
    freezes_weights: ClassVar[bool] = True

    schedule: str = "constant"
    every: int | None = 1
    budget: str = "uniform"
    first: str = "random"  # scores; magnitude: 1 for the largest weights, which the budget keeps, and 0.99 for the others
    signed_constant: bool = False  # first replace each weight by its sign times the layer's standard deviation
    momentum: float = 0.9  # of the scores
    decay: float = 1e-4  # of the scores
    seed: int = 0  # of the first scores

    def __post_init__(self) -> None:
        super().__post_init__()
        refuse_unknown("first", self.first, ["random", "magnitude"])

    def prepare(self, weights: SparseWeights, clock: Clock, probe: Probe) -> None:
        bounds = [(shape[0] / shape.numel()) ** 0.5 for shape in weights.shapes]  # 1 / √fan-in
        if self.first == "magnitude":
            weights.cut(super().scores(weights), self.sparsity(weights, clock), self.budget)
            first = [torch.where(mask, 1.0, 0.99).to(weights.state_dtype) for mask in weights.masks]
        else:
            first = [(2 * r - 1).to(weights.state_dtype) * bound for r, bound in zip(weights.random(self.seed), bounds)]
        self.state = {"scores": first, "momenta": weights.zeros_like()}
        if self.signed_constant:
            for value, bound in zip(weights.values, bounds):
                value.copy_(value.sign() * bound * (2 / (1 - weights.target)) ** 0.5)  # kaiming's, for the kept share
        super().prepare(weights, clock, probe)

    def scores(self, weights: SparseWeights) -> list[Tensor]:
        return list(torch._foreach_abs(self.layers("scores")))

    def after_backward(self, weights: SparseWeights, clock: Clock, lr: list[Tensor]) -> None:
        layers = list(weights.grads)
        if not layers:
            return
        every = weights.grads, weights.values, self.layers("scores"), self.layers("momenta"), lr
        grads, values, scores, momenta, rates = ([of[i] for i in layers] for of in every)
        toward = torch._foreach_mul(torch._foreach_mul(grads, values), torch._foreach_sign(scores))
        torch._foreach_add_(toward, scores, alpha=self.decay)
        if weights.skipped is None:
            torch._foreach_mul_(momenta, self.momentum)
            torch._foreach_add_(momenta, toward)
        else:
            for momentum, direction in zip(momenta, toward):
                momentum.copy_(torch.where(weights.skipped, momentum, self.momentum * momentum + direction))
        torch._foreach_addcmul_(scores, momenta, rates, value=-1.0)
        for i in layers:
            weights.parameters[i].grad = None  # an optimizer passes over what has no gradient: no step, no decay
