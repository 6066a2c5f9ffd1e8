"""AC/DC: Alternating Compressed/DeCompressed Training of Deep Neural Networks. Peste et al., 2021 (arXiv:2106.12379).

After a dense start, sparse and dense phases alternate. Each sparse phase begins with a cut to the target by magnitude; each
dense phase revives all weights, removed ones at 0. The last phase is sparse.

In one point this is not the paper's rule: every output neuron keeps at least one weight (`spare_neurons`). A neuron that lost
all of them has the variance 0 in the batch norm behind it, so its gradient is larger by 1/√ε ≈ 300. When its weights are
revived at 0, the first step makes them larger than all others. The next cut then keeps them and removes weights that had
learned. docs/results.md has the experiment.
"""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from optg.core.clock import Clock
from optg.core.floors import Floor
from optg.core.probe import Probe
from optg.core.weights import SparseWeights
from optg.methods.base import Method


@dataclass
class ACDC(Method):
    paper: ClassVar[str] = "Peste et al. 2021"
    regrows_at_zero: ClassVar[bool] = True
    added: ClassVar[dict[str, float]] = Method.added | {"spare_neurons": False}

    start: float = 0.1  # length of the dense start, as a share of training
    phase: float = 0.05  # length of each phase, as a share of training
    final: float = 0.15  # length of the last, sparse phase, as a share of training
    spare_neurons: bool = True  # every output neuron keeps at least one weight, unlike in the paper

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (0 <= self.start <= 1 and 0 < self.phase <= 1 and 0 <= self.final <= 1):
            raise ValueError(f"{self}; expected start, phase and final from 0 to 1, and phase above 0")

    def target_step(self, clock: Clock) -> int:
        return round((1 - self.final) * clock.total)

    def sparse(self, clock: Clock) -> bool:
        """Return whether the next step is in a sparse phase. The phase before the last is dense, and longer if need be."""
        last = self.target_step(clock)
        if clock.step >= last:
            return True
        length, first = max(1, round(self.phase * clock.total)), round(self.start * clock.total)
        phases = (clock.step - first) // length
        return phases >= 0 and phases % 2 == 0 and first + (phases + 2) * length <= last

    def prepare(self, weights: SparseWeights, clock: Clock, probe: Probe) -> None:
        if self.sparse(clock):
            self.cut(weights, weights.target)

    def scores(self, weights: SparseWeights) -> list[Tensor]:
        scores, largest = super().scores(weights), Floor(1e-9, "output")
        return [largest.raise_scores(s, axes) for s, axes in zip(scores, weights.axes)] if self.spare_neurons else scores

    def due(self, clock: Clock) -> bool:
        return self.sparse(clock) != self.sparse(clock.at(clock.step - 1))

    def after_update(self, weights: SparseWeights, clock: Clock) -> None:
        if self.sparse(clock):
            self.cut(weights, weights.target)
        else:
            weights.keep_all()
