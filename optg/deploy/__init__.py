"""Make trained models small and fast: packed files, export, inference that skips the zeros, and benchmarks."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from optg.deploy.two_four import semi_structured

__all__ = ["semi_structured"]


def __getattr__(name: str) -> Any:
    """Import torch only when it is needed."""
    if name in __all__:
        from optg.deploy import two_four

        return getattr(two_four, name)
    raise AttributeError(f"module 'optg.deploy' has no attribute {name!r}")
