"""The Lottery Ticket Hypothesis: iterative magnitude pruning. Frankle & Carbin, 2019 (arXiv:1803.03635), with the later
rewinding of arXiv:1912.05671.

Train, remove a share of the weights that are left, those of least magnitude, go back to the weights and optimizer state of
the beginning, and train again, until the target is reached: the announced epochs hold all cycles, in equal parts. The
learning rate should start anew with each, at its peak, also where `rewind` goes back to a later point:
`CosineAnnealingWarmRestarts(optimizer, T_0=sparsifier.method.cycle(clock))`, stepped with every optimizer step.
"""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from optg.core.clock import Clock, cycle_length
from optg.core.probe import Probe
from optg.core.prunable import optimizer_parameters, parameters_by_name, unwrap
from optg.core.sharding import local_piece, to_local
from optg.core.weights import SparseWeights
from optg.methods.base import Method


@dataclass
class IMP(Method):
    paper: ClassVar[str] = "Frankle & Carbin 2019"
    revives: ClassVar[bool] = False

    fraction: float = 0.2  # of the kept weights, removed after each cycle
    rewind: float = 0.0  # of a cycle: the point to go back to

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.fraction < 1 or not 0 <= self.rewind <= 1:
            raise ValueError(f"fraction is {self.fraction}, expected above 0 and below 1; rewind {self.rewind}, from 0 to 1")

    def prepare(self, weights: SparseWeights, clock: Clock, probe: Probe) -> None:
        self.model, self.target = unwrap(probe.model), weights.target
        if clock.total < 2 * self.cycles:
            fit = f"{self.cycles} cycles of training do not fit into {clock.total} steps; expected at least 2 steps each"
            raise ValueError(f"{fit}: train longer, or remove a larger `fraction` after each cycle")
        self.state = {"model": {}, "optimizer": {}}
        self.remember(weights, clock)

    @property
    def cycles(self) -> int:
        """How many times the model is trained."""
        prunings = math.log(1 - self.target) / math.log(1 - self.fraction)
        return math.ceil(prunings - 1e-9) + 1  # a target that so many prunings meet exactly, up to rounding, needs no more

    def cycle(self, clock: Clock) -> int:
        """Steps in a cycle, the last but shorter or longer by what does not divide evenly."""
        return cycle_length(clock.total, self.cycles)

    def capturable(self, clock: Clock) -> bool:
        return False

    def after_update(self, weights: SparseWeights, clock: Clock) -> None:
        length = self.cycle(clock)
        self.remember(weights, clock)
        done = clock.step // length
        if clock.step % length == 0 and done < self.cycles:
            last = done == self.cycles - 1
            self.cut(weights, weights.target if last else 1 - (1 - self.fraction) ** done)
            self.go_back(weights)

    def remember(self, weights: SparseWeights, clock: Clock) -> None:
        if clock.step != round(self.rewind * self.cycle(clock)):
            return
        mine = set(optimizer_parameters(weights.optimizer))
        others = {name for name, p in parameters_by_name(self.model).items() if p not in mine}  # of others, or frozen
        self.state["model"] = {n: t.detach().clone() for n, t in by_bare_name(self.model).items() if n not in others}
        states = enumerate(weights.optimizer.state.get(p, {}) for p in optimizer_parameters(weights.optimizer))
        tensors = ((f"{i} {key}", v) for i, state in states for key, v in state.items() if isinstance(v, Tensor))
        self.state["optimizer"] = {name: v.clone() for name, v in tensors}

    def go_back(self, weights: SparseWeights) -> None:
        now = by_bare_name(self.model)
        for name, before in self.tensors("model").items():
            to_local(now[name]).copy_(local_piece(now[name], before))
        for p in optimizer_parameters(weights.optimizer):
            weights.optimizer.state.pop(p, None)
        groups = [group for group in weights.optimizer.param_groups if group.get("fused") or group.get("capturable")]
        counted_there = {p for group in groups for p in group["params"]}  # their step count, too, is on the device
        for key, value in self.tensors("optimizer").items():
            i, name = key.split(" ")
            p = optimizer_parameters(weights.optimizer)[int(i)]
            device = p.device if value.ndim or p in counted_there else torch.device("cpu")
            weights.optimizer.state[p][name] = value.to(device, copy=True)


def by_bare_name(model: torch.nn.Module) -> dict[str, Tensor]:
    return {name.replace("_orig_mod.", ""): t for name, t in model.state_dict().items() if isinstance(t, Tensor)}
