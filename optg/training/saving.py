"""Save checkpoints during training, and resume from the newest one."""

import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from optg.training import checkpoint, state
from optg.training.divergence import DivergenceGuard
from optg.training.errors import DamagedFile, NothingToResume
from optg.training.folder import RunFolder
from optg.training.metrics import Head, read_rows
from optg.training.parallel import Parallel
from optg.training.setup import Setup
from optg.training.tally import EpochTally

if TYPE_CHECKING:
    from optg.training.progress import TrainingProgress


@dataclass
class CheckpointPolicy:
    minutes: float = 10.0  # between checkpoints; an epoch's end also saves one if a tenth of that has passed
    keep: int = 2  # number of checkpoints to keep

    def __post_init__(self) -> None:
        if self.keep < 1:
            raise ValueError(f"--keep is {self.keep}; expected at least 1")
        if not self.minutes > 0:
            raise ValueError(f"--minutes is {self.minutes}; expected a number above 0")


class Checkpointer:
    """Save and restore everything that training depends on."""

    def __init__(
        self,
        setup: Setup,
        folder: RunFolder,
        parallel: Parallel,
        tally: EpochTally,
        guard: DivergenceGuard,
        policy: CheckpointPolicy,
    ) -> None:
        self.setup, self.folder, self.parallel, self.tally, self.guard, self.policy = (
            setup, folder, parallel, tally, guard, policy,
        )  # fmt: skip
        self.saved_at = time.monotonic()
        self.newest: int | None = None  # step of the newest checkpoint

    def due(self) -> bool:
        """Return whether the time between checkpoints has passed."""
        return time.monotonic() - self.saved_at > 60 * self.policy.minutes

    def due_after_epoch(self) -> bool:
        """Return whether a tenth of the time between checkpoints has passed: the end of an epoch is a good moment to save."""
        return time.monotonic() - self.saved_at > 6 * self.policy.minutes

    def save(self) -> None:
        """Write a checkpoint, unless this step has one or training has diverged. Every process must call this."""
        setup, step = self.setup, self.setup.sparsifier.clock.step
        self.guard.check()
        if self.newest == step:
            return
        with self.guard.watch_cuts():
            tensors, values = state.gather(setup.model, setup.optimizer, setup.sparsifier, keep=self.parallel.is_first)
        if setup.quantization:
            tensors |= setup.quantization.tensors()
        epoch = self.tally.state(self.parallel)
        if self.parallel.is_first:
            rows = self.folder.metrics.head.to_json()
            values |= {"classes": setup.data.classes, "shape": setup.data.shape, "metrics": rows}
            checkpoint.save(self.folder.checkpoints, step, tensors | epoch, values, self.policy.keep)
        self.newest, self.saved_at = step, time.monotonic()

    def resume(self, progress: "TrainingProgress", begin: Callable[[], None]) -> None:
        """Restore the newest whole checkpoint, if there is one, and drop metrics of later steps.

        `begin` prepares the folder; the first process calls it once all have read the checkpoint. Nothing is written before.
        """
        setup = self.setup
        found = self.load(progress)
        if found:
            path, tensors, values = found
            state.restore(setup.model, setup.optimizer, setup.sparsifier, tensors, values)
            if setup.quantization:
                setup.quantization.restore(tensors)
                setup.quantize_if_due()
            self.tally.restore(tensors, self.parallel)
            self.newest = setup.sparsifier.clock.step
        step = setup.sparsifier.clock.step
        if self.parallel.max(step) != [-smallest for smallest in self.parallel.max(-step)]:
            raise ValueError(
                f"this process would resume at step {step}, another one elsewhere; {self.folder.path} must be the same folder "
                "for all of them, on a disk that they share"
            )
        if self.parallel.is_first:
            begin()
            for aside in checkpoint.set_aside_after(path) if found else ():
                progress.say(f"The damaged checkpoint is kept as {aside.name}")
            head = Head.parse(values.get("metrics")) if found else Head()
            if warning := self.folder.metrics.rewind(step - self.tally.steps, head):  # an unfinished epoch has no row yet
                progress.say(warning)
        if found:
            progress.say(f"Resuming from {path.name}")

    def load(self, progress: "TrainingProgress") -> tuple[Path, dict[str, Tensor], dict[str, Any]] | None:
        """Return the newest whole checkpoint; None in a new run. Raise an error if an earlier training would be lost."""
        folder, advice = self.folder, "Nothing was changed. To begin anew, give --fresh: it moves the earlier training aside"
        try:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                found = checkpoint.load_newest(folder.checkpoints)
        except DamagedFile as error:
            raise NothingToResume(f"{error}. {advice}") from None
        if found is None and self.parallel.is_first and not folder.metrics.is_empty:
            raise NothingToResume(
                f"{folder.path} has metrics of an earlier training, but no checkpoint to resume from. {advice}"
            )
        read_rows(folder.metrics.path)  # raises an error if it cannot be read
        for warning in caught:
            progress.say(str(warning.message))
        return found
