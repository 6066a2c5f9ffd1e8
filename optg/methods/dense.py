"""No pruning: ordinary training, the baseline of all methods."""

from dataclasses import dataclass
from typing import ClassVar

from optg.core.clock import Clock
from optg.core.probe import Probe
from optg.core.weights import SparseWeights
from optg.methods.base import Method


@dataclass
class Dense(Method):
    paper: ClassVar[str] = "–"
    when: ClassVar[str] = "never"
    revives: ClassVar[bool] = False
    single_weights: ClassVar[str] = "it removes nothing"

    def prepare(self, weights: SparseWeights, clock: Clock, probe: Probe) -> None:
        if weights.target:
            raise ValueError(f"dense training removes nothing; sparsity is {weights.target}, expected 0")
