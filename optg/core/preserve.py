"""Run a model without leaving a trace on it."""

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import nn


@contextmanager
def preserve_model(model: nn.Module) -> Iterator[None]:
    """Restore gradients, buffers, modes and random state at the end of the block."""
    grads = {p: p.grad for p in model.parameters()}
    buffers = [(m, name, b, b.clone()) for m in model.modules() for name, b in m._buffers.items() if b is not None]
    modes = {module: module.training for module in model.modules()}
    python, numpy = random.getstate(), np.random.get_state()  # augmentation often uses these
    for p in grads:
        p.grad = None
    try:
        with torch.random.fork_rng(sorted({p.device.index for p in model.parameters() if p.is_cuda})):
            yield
    finally:
        for p, grad in grads.items():
            p.grad = grad
        for module, mode in modes.items():
            module.training = mode
        random.setstate(python)
        np.random.set_state(numpy)
        with torch.no_grad():
            for module, name, buffer, saved in buffers:
                module._buffers[name] = buffer
                if not torch.equal(buffer, saved):
                    buffer.copy_(saved)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Run in evaluation mode, without gradients and with every layer called by itself; then restore modes and random state."""
    modes = {module: module.training for module in model.modules()}
    fast_path = torch.backends.mha.get_fastpath_enabled()
    gpus = sorted({p.device.index for p in model.parameters() if p.is_cuda})
    try:
        for module in modes:
            module.training = False  # not eval(), which a model may override
        torch.backends.mha.set_fastpath_enabled(False)  # the fast path runs a whole encoder layer at once
        eager = torch.compiler.set_stance("force_eager")  # compiled code does not see hooks that were added later
        with torch.random.fork_rng(gpus), torch.no_grad(), eager:
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast_path)
        for module, training in modes.items():
            module.training = training
