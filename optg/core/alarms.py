"""Warnings about the sparse model: layers that lost every weight, and a sparsity other than the target at the end."""

import warnings
from typing import Any

from optg.core.clock import Clock
from optg.core.truth import refuse_nonfinite
from optg.core.weights import SparseWeights


class CollapseWatch:
    """Warns of layers that have lost every weight: no signal passes through them."""

    def __init__(self, method: str, weights: SparseWeights) -> None:
        self.method, self.weights = method, weights
        self.known: set[str] = set()

    def warn(self, clock: Clock) -> None:
        """Warn once of each collapsed layer; raise if weights are not finite. Waits for the device."""
        self.weights.check()
        refuse_nonfinite(self.weights)
        zeros = self.weights.counts[:, 0].tolist()
        for name, shape, count in zip(self.weights.names, self.weights.shapes, zeros):
            if count == shape.numel() and name not in self.known:
                self.known.add(name)
                warnings.warn(
                    f"layer collapse: {self.method} has removed all {count} weights of {name} at step {clock.step}",
                    stacklevel=6,
                )


def reach_target(weights: SparseWeights, method: Any, name: str, clock: Clock) -> bool:
    """Make a last cut, with a warning, if training ended short of the target. Return whether it did."""
    target = weights.target
    if method.learns_sparsity:
        if abs(weights.sparsity - target) > 0.01:
            warnings.warn(
                f"training ended at sparsity {weights.sparsity:.4f}, not {target}: {name} learns its sparsity, which depends "
                f"on its options ({method})",
                stacklevel=4,
            )
        return False
    if int(weights.counts[:, 0].sum()) == weights.zeros(target):
        return False
    warnings.warn(
        f"training ended at sparsity {weights.sparsity:.4f}, short of {target}: {clock.step} optimizer steps were seen, but "
        f"{clock.announced}. One last cut brings it to {target}, with no training after it",
        stacklevel=4,
    )
    weights.show_latent()
    method.cut(weights, target)
    weights.check()
    weights.show_effective()
    return True
