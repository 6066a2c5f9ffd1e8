"""Time is one value: optimizer steps taken, read as epochs or as progress. No method counts steps of its own."""

from dataclasses import dataclass


@dataclass
class Clock:
    """The optimizer steps of one training run. Epochs are counted from 1, as in the paper's Algorithm 1."""

    epochs: int
    steps_per_epoch: int
    step: int = 0  # steps taken so far

    def __post_init__(self) -> None:
        for name in ("epochs", "steps_per_epoch"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} is {value!r}; expected a whole number of at least 1")

    @property
    def total(self) -> int:
        return self.epochs * self.steps_per_epoch

    @property
    def epoch(self) -> int:
        """The running epoch k = 1 … τ."""
        return min(self.step // self.steps_per_epoch + 1, self.epochs)

    @property
    def k(self) -> float:
        """The running epoch with its fraction: a whole number at an epoch's start."""
        return 1 + self.step / self.steps_per_epoch

    @property
    def progress(self) -> float:
        """0 before the first step, 1 after the last."""
        return min(self.step / self.total, 1.0)

    @property
    def at_epoch_start(self) -> bool:
        """Does the next step open an epoch?"""
        return self.step % self.steps_per_epoch == 0 and not self.finished

    @property
    def finished(self) -> bool:
        return self.step >= self.total


def cycle_length(total: int, cycles: int) -> int:
    """Steps of each of so many cycles but the last: it has what is left, fewer steps if those are at least half, else more."""
    longer = -(-total // cycles)
    return longer if 2 * (total - (cycles - 1) * longer) >= longer else total // cycles
