"""Warn of layers that have lost every weight: no signal passes through them any more."""

import warnings

from optg.core.clock import Clock
from optg.core.weights import SparseWeights


class CollapseWatch:
    def __init__(self, method: str, weights: SparseWeights) -> None:
        self.method, self.weights = method, weights
        self.known: set[str] = set()

    def warn(self, clock: Clock) -> None:
        """Warn once of each collapsed layer. Waits for the device."""
        self.weights.check()
        zeros = self.weights.counts[:, 0].tolist()
        for name, shape, count in zip(self.weights.names, self.weights.shapes, zeros):
            if count == shape.numel() and name not in self.known:
                self.known.add(name)
                warnings.warn(
                    f"layer collapse: {self.method} has removed all {count} weights of {name} at step {clock.step}",
                    stacklevel=6,
                )
