"""Time as one value: optimizer steps taken, read as epochs or as progress. No method counts steps of its own."""

import warnings
from dataclasses import dataclass, field, replace

ENDLESS = 2**62  # steps of a run whose length nobody announced


@dataclass
class Clock:
    """The optimizer steps of one run. Epochs are counted from 1, as in the paper's Algorithm 1."""

    epochs: int
    steps_per_epoch: int
    step: int = 0  # steps taken so far
    overrun: bool = field(default=False, compare=False, repr=False)  # has a step beyond the end been warned of?

    def __post_init__(self) -> None:
        for name in ("epochs", "steps_per_epoch"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} is {value!r}; expected a whole number of at least 1")

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
        return self.epochs * self.steps_per_epoch

    @property
    def position(self) -> str:
        """The steps taken in words, for messages: "step 3 of 20"."""
        return f"step {self.step}" + (f" of {self.total}" if self.total < ENDLESS else "")

    @property
    def announced(self) -> str:
        """The length of training in words, for messages."""
        product = f"epochs={self.epochs} × steps_per_epoch={self.steps_per_epoch}"
        return f"{self.total} were announced ({product}, which counts optimizer steps)"

    @property
    def epoch(self) -> int:
        """The current epoch k = 1 … τ."""
        return min(self.step // self.steps_per_epoch + 1, self.epochs)

    @property
    def k(self) -> float:
        """The current epoch with its fraction: a whole number at the start of an epoch."""
        return 1 + self.step / self.steps_per_epoch

    @property
    def progress(self) -> float:
        """0 before the first step, 1 after the last."""
        return min(self.step / self.total, 1.0)

    @property
    def at_epoch_start(self) -> bool:
        """Whether the next step opens an epoch."""
        return self.step % self.steps_per_epoch == 0 and not self.finished

    @property
    def finished(self) -> bool:
        return self.step >= self.total


def cycle_length(total: int, cycles: int) -> int:
    """Return the steps of each cycle but the last, which takes the rest: half a cycle at least."""
    longer = -(-total // cycles)
    return longer if 2 * (total - (cycles - 1) * longer) >= longer else total // cycles
