"""Pruning neural networks without any data by iteratively conserving synaptic flow (SynFlow, arXiv:2006.05467).

Before training and without data, in many rounds: score = (dR/d|w|)·|w|, where R is the sum of the outputs for an input of
ones with every weight's absolute value. Round r of n keeps the share (1 − P)^(r/n). The scores of every layer have the same
sum, so no layer loses all its weights.
"""

from dataclasses import dataclass
from typing import ClassVar

from optg.core.clock import Clock
from optg.core.probe import Probe
from optg.core.weights import SparseWeights
from optg.methods.base import Method


@dataclass
class SynFlow(Method):
    paper: ClassVar[str] = "Tanaka et al. 2020"
    when: ClassVar[str] = "before"
    revives: ClassVar[bool] = False

    rounds: int = 100  # number of cuts, each of which removes the same share of the remaining weights

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rounds < 1:
            raise ValueError(f"rounds is {self.rounds}; expected at least 1")

    def prepare(self, weights: SparseWeights, clock: Clock, probe: Probe) -> None:
        inputs = probe.ones()
        before = [v.clone() for v in weights.values]
        try:
            for r in range(1, self.rounds + 1):
                sparsity = weights.target if r == self.rounds else 1 - (1 - weights.target) ** (r / self.rounds)
                flow = probe.synaptic_flow(weights, inputs)
                weights.cut([f.where(m, -1.0) for f, m in zip(flow, weights.masks)], sparsity)  # kept ones may be 0
                weights.show_effective()
        finally:
            for value, old in zip(weights.values, before):
                value.copy_(old)
