"""Stop training when the loss is no longer finite, and say where it began."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from optg.core.clock import Clock
from optg.training.checkpoint import list_checkpoints
from optg.training.errors import Diverged
from optg.training.folder import RunFolder
from optg.training.tally import EpochTally


class DivergenceGuard:
    def __init__(self, model: nn.Module, clock: Clock, tally: EpochTally, folder: RunFolder) -> None:
        self.model, self.clock, self.tally, self.folder = model, clock, tally, folder

    def check(self) -> None:
        """Raise Diverged if a loss of this epoch is not finite. Forces a CPU–GPU sync."""
        losses = self.tally.losses
        bad = (~torch.stack(losses).isfinite()).nonzero().flatten().tolist() if losses else []
        if bad:
            step = self.clock.step - len(losses) + bad[0] + 1
            layer = self.first_bad_gradient() or "none"
            loss = losses[bad[0]].item()
            raise Diverged(f"the loss is {loss} at step {step}; first non-finite gradient: {layer}. {self.advice()}")

    @contextmanager
    def watch_cuts(self) -> Iterator[None]:
        """Raise Diverged if a cut meets a score that is not finite, preferably naming the loss that caused it."""
        before = self.clock.step
        try:
            yield
        except FloatingPointError as error:
            self.clock.step = before  # the step was not completed
            self.check()
            raise Diverged(f"step {before + 1}: {error}. {self.advice()}") from None

    def first_bad_gradient(self) -> str | None:
        """Return the name of the first parameter whose gradient is not finite."""
        gradients = ((name, p.grad) for name, p in self.model.named_parameters() if p.grad is not None)
        return next((name for name, gradient in gradients if not gradient.isfinite().all()), None)

    def advice(self) -> str:
        saved = list_checkpoints(self.folder.checkpoints)
        last = f"The last good checkpoint is {saved[-1]}." if saved else "There is no checkpoint yet."
        return f"{last} Train again with a lower learning rate (--lr)"
