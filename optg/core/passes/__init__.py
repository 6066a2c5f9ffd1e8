"""Passes: sweeps over the weights of all layers. Every backend is a module that defines the same functions.

A training step uses `restore`, `mask`, `settle`, `soften`, `accumulate` and `sum_signed`; a change of the mask uses `select`,
`write_masks`, `new_masks` and `keep_above`. `reference` implements them with torch operations on any device, `fused` with one
Triton kernel each.
"""

from collections.abc import Iterable
from importlib import import_module
from types import ModuleType

from torch import Tensor

from optg.core.passes import reference

BACKENDS = {"cuda": "optg.core.passes.fused"}  # by device type; all other devices use the reference


def choose(tensors: Iterable[Tensor]) -> ModuleType:
    """Return the backend for the device that holds all tensors; the reference if they are on several devices."""
    devices = {t.device for t in tensors}
    name = BACKENDS.get(devices.pop().type) if len(devices) == 1 else None
    try:
        return import_module(name) if name else reference
    except ImportError:  # Triton is not installed
        return reference
