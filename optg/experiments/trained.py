"""Start training from the model of a finished run: `optg train --model optg.experiments.trained:runs/RUN …`."""

from collections.abc import Callable
from pathlib import Path

from torch import nn

PREFIX = "optg.experiments.trained:"
OPENING: list[Path] = []  # runs whose models are being built, each starting from the next


def __getattr__(name: str) -> Callable[..., nn.Module]:
    """Return a function that builds the model of a run folder. `optg.models.build` looks up the part after the colon here."""
    if name.startswith("__"):
        raise AttributeError(name)
    if not (Path(name) / "model.safetensors").is_file():
        raise ValueError(f"{name} has no model.safetensors; expected the folder of a finished run")

    def build(classes: int) -> nn.Module:
        from optg.training.saved import SavedRun

        folder = Path(name).resolve()
        if folder in OPENING:
            raise ValueError(f"the run {name} starts from its own model; expected a recipe that names another one")
        OPENING.append(folder)
        try:
            return SavedRun.open(name).model(classes)
        finally:
            OPENING.pop()

    return build
