"""Import torchvision next to any build of torch. Lightning's metrics, timm and some models of transformers need it."""

from importlib import import_module
from types import ModuleType

import torch

DECLARED: list[torch.library.Library] = []  # operations exist as long as their library object


def import_torchvision() -> ModuleType:
    """Import torchvision. Its compiled part is missing next to a CPU build of torch; then declare its two operations first."""
    try:
        return import_module("torchvision")
    except RuntimeError:
        DECLARED.append(torch.library.Library("torchvision", "DEF"))
        for missing in ("nms", "qnms"):
            DECLARED[-1].define(f"{missing}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        return import_module("torchvision")
