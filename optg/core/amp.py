"""Optimizer steps with a GradScaler or a closure."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from optg.core.prunable import optimizer_parameters
from optg.core.sharding import to_local


def unscale(optimizer: torch.optim.Optimizer) -> Tensor:
    """Undo a GradScaler's scale before a fused optimizer does: a GradScaler leaves `grad_scale` and `found_inf` to these.

    Return whether the optimizer will skip this step, as a tensor on the device (no sync). Gradients of a skipped step become 0.
    """
    skipped, scale = optimizer.found_inf.reshape(()).bool(), getattr(optimizer, "grad_scale", None)  # type: ignore[attr-defined]
    for grad in (to_local(p.grad) for p in optimizer_parameters(optimizer) if p.grad is not None):
        if scale is not None:
            grad.div_(scale.to(grad.device))
        grad.masked_fill_(skipped.to(grad.device), 0.0)
    if scale is not None:
        optimizer.grad_scale = torch.ones_like(scale)  # type: ignore[attr-defined]
    return skipped


def return_loss(loss: Any, optimizer: torch.optim.Optimizer) -> Callable[[], Any]:
    """Return a closure that returns a known loss. It raises if the optimizer has moved a weight: the loss would be stale."""
    versions = [p._version for p in optimizer_parameters(optimizer)]

    def closure() -> Any:
        if versions != [p._version for p in optimizer_parameters(optimizer)]:
            raise RuntimeError(
                f"{type(optimizer).__name__} evaluates the model again after moving its weights, while the model holds latent "
                "weights. Use SGD, AdamW or another optimizer that evaluates the model once, before it moves"
            )
        return loss

    return closure
