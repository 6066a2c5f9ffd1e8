"""Training steps whose forward tries dormant weights: it uses a lower threshold, and leaves batch-norm statistics alone."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from optg.core.passes.reference import SoftThreshold, power_threshold
from optg.core.weights import SparseWeights


class Trials:
    """A hook before a model's forward. `find_threshold` returns the threshold of a trial, or None for a usual step."""

    def __init__(
        self,
        model: nn.Module,
        weights: SparseWeights,
        find_threshold: Callable[[], SoftThreshold | None],
        leave: Callable[[], None],
    ) -> None:
        self.weights, self.find_threshold, self.leave = weights, find_threshold, leave
        self.running: list[tuple[Tensor, Tensor]] = []  # batch-norm buffers, and their values before the trial
        self.open = False  # the parameters hold the weights of a trial
        self.hooks = [model.register_forward_pre_hook(self.before_forward)]

    @torch.compiler.disable
    @torch.no_grad()
    def before_forward(self, model: nn.Module, inputs: Any) -> None:
        threshold = self.find_threshold() if model.training else None
        if threshold is None:
            if self.open:
                self.leave()  # there was no step after the trial
            return
        if not self.open:  # else this is another part of the same batch
            names = ("running_mean", "running_var", "num_batches_tracked")
            buffers = [getattr(module, name, None) for module in model.modules() for name in names]
            self.running = [(b, b.clone()) for b in buffers if isinstance(b, Tensor)]
        self.open = True
        self.show(threshold)

    def show(self, threshold: SoftThreshold) -> None:
        """Set the parameters to the weights above a threshold, dormant ones too."""
        weights = self.weights
        assert weights.latent is not None

        def effective(layer: int, latent: Tensor) -> Tensor:
            return power_threshold(latent, threshold.thresholds[layer], threshold.power)

        everything = [torch.ones_like(mask) for mask in weights.masks]
        weights.passes.soften(weights.values, everything, weights.latent, effective, threshold)

    def close(self) -> None:
        """Forget the statistics of a trial. Not sooner than after backward, which reads them."""
        for buffer, before in self.running:
            buffer.copy_(before)
        self.running, self.open = [], False
