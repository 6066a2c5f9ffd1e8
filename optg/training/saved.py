"""Open what a run has saved: its folder, or one of its checkpoints."""

from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from optg import models
from optg.training import checkpoint, quantization, recipe
from optg.training.errors import DamagedFile
from optg.training.folder import is_run
from optg.training.manifest import MANIFEST, MODEL, RANGES, RECIPE, SUMMARY
from optg.training.recipe import Plan
from optg.training.run_files import RunFiles

LARGEST_IMAGE = 2**26  # numbers; commands allocate one image of the stated shape


@dataclass
class SavedRun:
    """A run folder or one of its checkpoints, opened for reading. Everything that is read is checked."""

    path: Path  # the folder or checkpoint that was opened
    files: RunFiles  # the run folder's
    plan: Plan
    is_checkpoint: bool = False

    @classmethod
    def open(cls, path: str | Path) -> "SavedRun":
        """Open a run folder, or a checkpoint RUN/checkpoints/step-N."""
        path = Path(path)
        if not path.exists():
            raise FileNotFoundError(f"there is no folder {path}; expected the folder of a run, or RUN/checkpoints/step-N")
        is_checkpoint = not is_run(path) and checkpoint.NAME.fullmatch(path.resolve().name) is not None
        home = path.resolve().parent.parent if is_checkpoint else path
        if not is_run(home):
            raise ValueError(
                f"{path} is neither the folder of a run (it has no recipe.toml) nor one of its checkpoints "
                "(RUN/checkpoints/step-N)"
            )
        files = RunFiles(home)
        files.warn_if_old()
        return cls(path, files, recipe.read_file(home / RECIPE, files.read(RECIPE)), is_checkpoint)

    @property
    def home(self) -> Path:
        """The run folder."""
        return self.files.path

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
        if not self.is_checkpoint:
            self.require(SUMMARY)
        facts = self.contents[1] if self.is_checkpoint else self.files.summary()
        try:
            classes, shape = int(facts["classes"]), tuple(map(int, facts["shape"]))
        except (ValueError, KeyError, TypeError):
            classes, shape = 0, ()
        source = self.path if self.is_checkpoint else self.path / SUMMARY
        if prod(shape) > LARGEST_IMAGE:
            size = "×".join(map(str, shape))
            raise ValueError(f"{source} states images of {size}; expected at most {LARGEST_IMAGE:,} numbers")
        if classes < 1 or not shape or min(shape) < 1:
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
        self.require(MODEL)
        return self.files.tensors(MODEL)

    def ranges(self) -> dict[str, Tensor]:
        """Return the ranges of activations that training with `--quantize` has learned, for the int8 model."""
        if not self.plan.recipe.quantize:
            raise ValueError(f"{self.home} was not trained with --quantize int8, so it has no ranges of activations")
        if self.is_checkpoint:
            if not (found := quantization.ranges_in(self.contents[0])):
                raise ValueError(f"{self.path} was saved before the quantized part of training, so it has no ranges")
            return found
        self.require(RANGES)
        return self.files.tensors(RANGES)

    def newest_checkpoint(self) -> "SavedRun | None":
        """Return this checkpoint, or the run's newest one. None if the run has none."""
        if self.is_checkpoint:
            return self
        saved = checkpoint.list_checkpoints(self.home / "checkpoints")
        return SavedRun(saved[-1], self.files, self.plan, is_checkpoint=True) if saved else None

    @cached_property
    def contents(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """All tensors and values of a checkpoint."""
        try:
            return checkpoint.load(self.path)
        except DamagedFile as error:
            others = [p.name for p in checkpoint.list_checkpoints(self.path.resolve().parent) if p.name != self.path.name]
            raise ValueError(f"checkpoint {self.path} is damaged ({error}); others: {', '.join(others) or 'none'}") from None

    def require(self, file: str) -> None:
        """Raise an error if the run lacks a file that every finished run has."""
        if not self.files.has(file):
            newest = self.newest_checkpoint()
            instead = f", or use its checkpoint {newest.path}" if newest else ""
            lost = self.files.manifest and file in self.files.manifest.files
            reason = f"{MANIFEST} lists it, so it was lost" if lost else "the run has not finished"
            raise ValueError(f"{self.path} has no {file}: {reason}. Give the run's training command again{instead}")
