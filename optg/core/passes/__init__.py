"""Passes: sweeps over the weights of all layers. Every backend defines the same functions.

A step makes `restore`, `mask`, `settle`, `soften`, `accumulate`, `sum_signed`, and with HAM or SparseOpt `scale_outputs`,
`hyperbolic`, `rescale`; a change of the mask makes `select`, `write_masks`, `new_masks`, `keep_above`. `reference` does them
with torch operations on any device, `fused` with one Triton kernel each. A backend is a module with these functions, or with a
class `Passes` that has them as methods and is made once per model. `units` and `fused_units` have the passes of structures.
"""

from collections.abc import Iterable
from importlib import import_module
from typing import Any

from torch import Tensor

from optg.core.passes import reference

BACKENDS = {"cuda": "optg.core.passes.fused"}  # by device type; all other devices use the reference


def choose(tensors: Iterable[Tensor]) -> Any:
    """Return the passes for the device that holds all tensors; the reference if they are on several devices."""
    devices = {t.device for t in tensors}
    name = BACKENDS.get(devices.pop().type) if len(devices) == 1 else None
    try:
        backend = import_module(name) if name else reference
    except ImportError:  # Triton is not installed
        return reference
    return backend.Passes() if hasattr(backend, "Passes") else backend


def of_units(passes: Any) -> Any:
    """Return the passes of structures: those of a backend, or of `units` if it has none."""
    return passes if hasattr(passes, "protect") else import_module("optg.core.passes.units")
