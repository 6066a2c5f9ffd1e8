"""Passes that torch's own operations would make many of, fused for a GPU."""

from collections.abc import Iterable
from types import ModuleType

from torch import Tensor


def find_kernels(tensors: Iterable[Tensor]) -> ModuleType | None:
    """The Triton kernels, where the tensors are on one GPU and there is Triton; else torch's own operations do the work."""
    devices = {t.device for t in tensors}
    if len(devices) != 1 or devices.pop().type != "cuda":
        return None
    try:
        from optg.core.passes import fused
    except ImportError:
        return None
    return fused
