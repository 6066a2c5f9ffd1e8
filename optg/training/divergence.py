"""A loss that is no longer a number: say where it began, and what to go back to."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from optg.core.clock import Clock
from optg.training.checkpoint import list_steps
from optg.training.folder import RunFolder


class Diverged(Exception):
    """The loss is no longer a number."""


def refuse_nan(losses: list[Tensor], model: nn.Module, folder: RunFolder, clock: Clock) -> None:
    """Stop where a loss of the last steps is not a number."""
    bad = (~torch.stack(losses).isfinite()).nonzero().flatten().tolist() if losses else []  # a sync
    if not bad:
        return
    grads = ((name, p.grad) for name, p in model.named_parameters() if p.grad is not None)
    layer = next((name for name, grad in grads if not grad.isfinite().all()), "no layer")
    step = clock.step - len(losses) + bad[0] + 1
    raise Diverged(f"the loss is {losses[bad[0]].item()} at step {step}; first non-finite gradient: {layer}. {advice(folder)}")


def advice(folder: RunFolder) -> str:
    saved = list_steps(folder.checkpoints)
    return f"The last good checkpoint is {saved[-1] if saved else 'none'}: lower the learning rate and start again"


@contextmanager
def no_mask_of_nan(losses: list[Tensor], model: nn.Module, folder: RunFolder, clock: Clock) -> Iterator[None]:
    """A cut may be the first to meet a score that is no number: the loss was none before it."""
    before = clock.step
    try:
        yield
    except FloatingPointError as error:
        clock.step = before  # the step was not finished
        refuse_nan(losses, model, folder, clock)
        raise Diverged(f"step {before + 1}: {error}. {advice(folder)}") from None
