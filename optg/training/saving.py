"""Save checkpoints during training, and resume from the newest one."""

import time
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING

from optg.training import checkpoint, state
from optg.training.divergence import DivergenceGuard
from optg.training.folder import RunFolder
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

    def due(self) -> bool:
        """Return whether the time between checkpoints has passed."""
        return time.monotonic() - self.saved_at > 60 * self.policy.minutes

    def due_after_epoch(self) -> bool:
        """Return whether a tenth of the time between checkpoints has passed: the end of an epoch is a good moment to save."""
        return time.monotonic() - self.saved_at > 6 * self.policy.minutes

    def save(self) -> None:
        """Write a checkpoint, unless training has diverged. Every process must call this."""
        setup = self.setup
        self.guard.check()
        with self.guard.watch_cuts():
            tensors, values = state.gather(setup.model, setup.optimizer, setup.sparsifier, keep=self.parallel.is_first)
        if self.parallel.is_first:
            values |= {"classes": setup.data.classes, "shape": setup.data.shape}
            tensors |= self.tally.state()
            checkpoint.save(self.folder.checkpoints, setup.sparsifier.clock.step, tensors, values, self.policy.keep)
        self.saved_at = time.monotonic()

    def resume(self, progress: "TrainingProgress") -> None:
        """Restore the newest intact checkpoint, if there is one, and drop metrics of later steps."""
        setup = self.setup
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            found = checkpoint.load_newest(self.folder.checkpoints)
        for warning in caught:
            progress.say(str(warning.message))
        if found:
            path, tensors, values = found
            state.restore(setup.model, setup.optimizer, setup.sparsifier, tensors, values)
            self.tally.restore(tensors)
        step = setup.sparsifier.clock.step
        if self.parallel.max(step) != [-smallest for smallest in self.parallel.max(-step)]:
            raise ValueError(
                f"this process would resume at step {step}, another one elsewhere; {self.folder.path} must be the same folder "
                "for all of them, on a disk that they share"
            )
        if self.parallel.is_first:
            self.folder.drop_metrics_after(step - self.tally.steps)  # an unfinished epoch has no row yet
        if found:
            progress.say(f"Resuming from {path.name}")
