"""Count zeros in the weights themselves, whatever a sparsifier says."""

import math

from torch import nn


def zeros(model: nn.Module) -> int:
    """Return the number of zeros in all linear layers."""
    return sum(int((m.weight == 0).sum()) for m in model.modules() if isinstance(m, nn.Linear))


def expected_zeros(model: nn.Module, sparsity: float) -> int:
    return math.ceil(sparsity * sum(m.weight.numel() for m in model.modules() if isinstance(m, nn.Linear)))
