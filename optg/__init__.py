"""optg: neural networks made sparse while they train.

sparsifier = optg.sparsify(model, optimizer, method="optg", sparsity=0.95, epochs=100, steps_per_epoch=len(loader))
"""

TYPE_CHECKING = False  # not imported from typing: `python -m optg` must import nothing before optg.trust, see there
if TYPE_CHECKING:
    from typing import Any

    from optg import deploy, methods
    from optg.core.adopt import masks_from
    from optg.core.channels.shrink import shrink
    from optg.core.layer_kinds import prunable
    from optg.deploy.compile import compile
    from optg.deploy.export import save
    from optg.deploy.packed import load
    from optg.deploy.quantize import quantize
    from optg.sparsifier import Sparsifier, sparsify

__all__ = [
    "Sparsifier", "compile", "deploy", "load", "masks_from", "methods", "prunable", "quantize", "save", "shrink", "sparsify",
]  # fmt: skip
__version__ = "0.1.0"
HOMES = {
    "compile": "optg.deploy.compile",
    "load": "optg.deploy.packed",
    "masks_from": "optg.core.adopt",
    "prunable": "optg.core.layer_kinds",
    "quantize": "optg.deploy.quantize",
    "save": "optg.deploy.export",
    "shrink": "optg.core.channels.shrink",
}


def __getattr__(name: str) -> "Any":
    """Import torch when it is first needed, not before: `optg --help` answers at once."""
    from importlib import import_module

    if name in ("deploy", "methods"):
        return import_module(f"optg.{name}")
    if name in __all__:
        return getattr(import_module(HOMES.get(name, "optg.sparsifier")), name)
    raise AttributeError(f"module 'optg' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
