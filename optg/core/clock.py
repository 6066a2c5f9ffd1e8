"""Time as one value: optimizer steps taken, read as epochs or as progress. Methods never count steps themselves."""

import warnings
from dataclasses import dataclass, field, replace

VIRTUAL_EPOCHS = 100  # epochs of a run whose length is given in steps alone
ENDLESS = 2**62  # steps of a run whose length nobody announced


@dataclass
class Clock:
    """The optimizer steps of one run. Epochs are counted from 1, as in the paper's Algorithm 1."""

    epochs: int
    steps_per_epoch: int  # rounded down if `steps` is set
    step: int = 0  # steps taken so far
    steps: int | None = None  # the length of training, if it is not epochs × steps_per_epoch
    overrun: bool = field(default=False, compare=False, repr=False)  # whether `tick` has warned of a step past the end

    def __post_init__(self) -> None:
        for name in ("epochs", "steps_per_epoch"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} is {value!r}; expected a whole number of at least 1")

    @classmethod
    def of(cls, epochs: int | None, steps_per_epoch: int | None, steps: int | None) -> "Clock":
        """Make a clock from `steps`, from `epochs` and `steps`, or from `epochs` and `steps_per_epoch`.

        Epoch k then ends after round(k · steps / epochs) steps. With `steps` alone there are min(100, steps) epochs, so that
        schedules in epochs (Eq. 15 and 16) keep their meaning.
        """
        if steps is None and epochs is not None and steps_per_epoch is not None:
            return cls(epochs, steps_per_epoch)
        if steps is None or steps_per_epoch is not None:
            raise ValueError(
                "the length of training is not clear: give `steps`, the number of optimizer steps, or `epochs` and "
                "`steps_per_epoch`"
            )
        if not isinstance(steps, int) or steps < 1:
            raise ValueError(f"steps is {steps!r}; expected a whole number of at least 1")
        epochs = min(VIRTUAL_EPOCHS, steps) if epochs is None else epochs
        if isinstance(epochs, int) and epochs > steps:
            raise ValueError(f"epochs is {epochs} and steps is {steps}; expected at least one step per epoch")
        return cls(epochs, max(1, steps // max(1, epochs)), steps=steps)

    def tick(self) -> None:
        """Advance by one step; warn once past the announced end."""
        self.step += 1
        if self.step > self.total and not self.overrun:
            self.overrun = True
            warnings.warn(f"optimizer step {self.step}, but {self.announced}: the mask no longer changes", stacklevel=7)

    def at(self, step: int) -> "Clock":
        """Return the clock as it is after `step` steps."""
        return replace(self, step=step)

    @property
    def total(self) -> int:
        return self.epochs * self.steps_per_epoch if self.steps is None else self.steps

    @property
    def position(self) -> str:
        """The steps taken in words, for messages: "step 3 of 20"."""
        return f"step {self.step}" + (f" of {self.total}" if self.total < ENDLESS else "")

    @property
    def announced(self) -> str:
        """The length of training in words, for messages."""
        if self.steps is not None:
            return f"{self.steps} were announced (steps={self.steps})"
        product = f"epochs={self.epochs} × steps_per_epoch={self.steps_per_epoch}"
        return f"{self.total} were announced ({product}, which counts optimizer steps)"

    @property
    def epoch(self) -> int:
        """The current epoch k = 1 … τ."""
        return min(self.epochs_before(self.step) + 1, self.epochs)

    @property
    def k(self) -> float:
        """The current epoch with its fraction: a whole number at the start of an epoch."""
        return 1 + (self.step / self.steps_per_epoch if self.steps is None else self.step * self.epochs / self.steps)

    def epochs_before(self, step: int) -> int:
        """Return the number of epochs that have ended after `step` steps."""
        if self.steps is None:
            return step // self.steps_per_epoch
        done = min(step * self.epochs // self.steps + 1, self.epochs)  # rounding may end an epoch half a step earlier
        return done if self.end_of(done) <= step else done - 1

    def end_of(self, epoch: int) -> int:
        """Return the number of steps after which an epoch ends."""
        return epoch * self.steps_per_epoch if self.steps is None else round(epoch * self.steps / self.epochs)

    @property
    def between_epochs(self) -> bool:
        """Whether an epoch has just ended, or training has not begun."""
        return self.step == self.end_of(self.epochs_before(self.step))

    @property
    def progress(self) -> float:
        """0 before the first step, 1 after the last."""
        return min(self.step / self.total, 1.0)

    @property
    def at_epoch_start(self) -> bool:
        """Whether the next step opens an epoch."""
        return self.between_epochs and not self.finished

    @property
    def finished(self) -> bool:
        return self.step >= self.total


def cycle_length(total: int, cycles: int) -> int:
    """Return the length of every cycle but the last. The last has the remaining steps, at least half a cycle."""
    longer = -(-total // cycles)
    return longer if 2 * (total - (cycles - 1) * longer) >= longer else total // cycles
