"""Make trained models small and fast: packed files, export, inference that skips the zeros, and benchmarks."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from optg.deploy.quantize import int8_quantizer
    from optg.deploy.two_four import semi_structured

__all__ = ["int8_quantizer", "semi_structured"]
HOMES = {"int8_quantizer": "optg.deploy.quantize", "semi_structured": "optg.deploy.two_four"}


def __getattr__(name: str) -> Any:
    """Import torch only when it is needed."""
    from importlib import import_module

    if name in __all__:
        return getattr(import_module(HOMES[name]), name)
    raise AttributeError(f"module 'optg.deploy' has no attribute {name!r}")
