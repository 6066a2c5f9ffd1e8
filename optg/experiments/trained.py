"""The trained model of a run as a model to start from: `optg train --model optg.experiments.trained:runs/RUN …`."""

from collections.abc import Callable
from pathlib import Path

from torch import nn

PREFIX = "optg.experiments.trained:"


def __getattr__(name: str) -> Callable[..., nn.Module]:
    """`optg.models.build` looks the part after the colon up in this module: every run is a function here."""
    if name.startswith("__"):
        raise AttributeError(name)
    if not (Path(name) / "model.safetensors").is_file():
        raise ValueError(f"{name} has no model.safetensors: expected the folder of a run that has ended")

    def build(classes: int) -> nn.Module:
        from optg.training.saved import SavedRun

        return SavedRun.open(name).model(classes)

    return build
