"""Open what a run has saved: its folder, or one of its checkpoints."""

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from optg import models
from optg.training import checkpoint, recipe
from optg.training.folder import is_run
from optg.training.recipe import Plan


@dataclass
class SavedRun:
    """A run folder or one of its checkpoints, opened for reading."""

    path: Path  # the folder or checkpoint that was opened
    home: Path  # the run folder
    plan: Plan
    is_checkpoint: bool = False

    @classmethod
    def open(cls, path: str | Path) -> "SavedRun":
        """Open a run folder, or a checkpoint RUN/checkpoints/step-N."""
        path = Path(path)
        if not path.exists():
            raise FileNotFoundError(f"there is no folder {path}; expected the folder of a run, or RUN/checkpoints/step-N")
        is_checkpoint = not is_run(path) and path.resolve().name.startswith("step-")
        home = path.resolve().parent.parent if is_checkpoint else path
        if not is_run(home):
            raise ValueError(
                f"{path} is neither the folder of a run (it has no recipe.toml) nor one of its checkpoints "
                "(RUN/checkpoints/step-N)"
            )
        return cls(path, home, recipe.load(str(home / "recipe.toml")), is_checkpoint)

    @property
    def classes(self) -> int:
        """The number of classes the model distinguishes."""
        return self.facts["classes"]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one input image: channels, height, width."""
        return self.facts["shape"]

    @cached_property
    def facts(self) -> dict[str, Any]:
        """The run's summary or the checkpoint's values. Both hold `classes` and `shape`."""
        facts = self.contents[1] if self.is_checkpoint else read_json(self.require("summary.json"))
        try:
            classes, shape = int(facts["classes"]), tuple(map(int, facts["shape"]))
        except (ValueError, KeyError, TypeError):
            classes, shape = 0, ()
        if classes < 1 or not shape or min(shape) < 1:
            source = self.path if self.is_checkpoint else self.path / "summary.json"
            raise ValueError(f"{source} is damaged, or from another version of optg: it does not state classes and shape")
        return {**facts, "classes": classes, "shape": shape}

    def model(self, classes: int | None = None) -> nn.Module:
        """Build the model on the CPU and load the saved weights. `classes` is as recorded unless given."""
        weights = self.weights()
        model = models.build(self.plan.recipe.model, classes or self.classes, self.plan.recipe.model_options)
        try:
            model.load_state_dict(weights)
        except RuntimeError as error:
            reason = " ".join(line.strip() for line in str(error).splitlines()[:2])
            raise ValueError(f"the weights in {self.path} do not fit the model {self.plan.recipe.model}: {reason}") from None
        return model

    def weights(self) -> dict[str, Tensor]:
        """Return the model's state dict."""
        if self.is_checkpoint:  # which also holds tensors of the optimizer and the sparsifier
            return {n.removeprefix("model."): t for n, t in self.contents[0].items() if n.startswith("model.")}
        file = self.require("model.safetensors")
        try:
            return load_file(file)
        except SafetensorError as error:
            raise ValueError(f"{file} is damaged: {error}") from None

    def newest_checkpoint(self) -> "SavedRun | None":
        """Return this checkpoint, or the run's newest one. None if the run has none."""
        if self.is_checkpoint:
            return self
        saved = checkpoint.list_checkpoints(self.home / "checkpoints")
        return SavedRun(saved[-1], self.home, self.plan, is_checkpoint=True) if saved else None

    @cached_property
    def contents(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """All tensors and values of a checkpoint."""
        try:
            return checkpoint.load(self.path)
        except checkpoint.DamagedCheckpoint as error:
            others = [p.name for p in checkpoint.list_checkpoints(self.path.resolve().parent) if p.name != self.path.name]
            raise ValueError(f"checkpoint {self.path} is damaged ({error}); others: {', '.join(others) or 'none'}") from None

    def require(self, file: str) -> Path:
        """Return the path of a file that every finished run has, or raise an error."""
        if (self.path / file).is_file():
            return self.path / file
        newest = self.newest_checkpoint()
        instead = f", or use its checkpoint {newest.path}" if newest else ""
        raise ValueError(f"{self.path} has no {file}: the run has not finished. Continue it with the same command{instead}")


def read_json(path: Path) -> Any:
    """Return the parsed file, or None if it is missing or damaged."""
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return None
