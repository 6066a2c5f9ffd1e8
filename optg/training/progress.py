"""Show the progress of a run: a progress bar in a terminal, one line per epoch in a log."""

import signal
import time
from typing import Any, Self

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from optg.naming import visible
from optg.training.loggers import RunLog
from optg.training.recipe import Recipe
from optg.training.tally import EpochTally

REFRESH_SECONDS = 0.5  # reading the loss is a CPU–GPU sync, so do it seldom


class TrainingProgress:
    """As a context manager: show progress, pass each epoch's metrics to the loggers, and finish the loggers at the end."""

    def __init__(self, name: str, console: Console, silent: bool = False, log: RunLog | None = None) -> None:
        self.name, self.console, self.silent = visible(name), console, silent
        self.log = log or RunLog()
        self.live = console.is_terminal and not silent
        self.wide = console.width >= 120
        columns = (BarColumn(None if self.wide else 10), TextColumn("{task.fields[text]}"), TimeElapsedColumn())
        description = (TextColumn("{task.description}", markup=False),) if self.wide else ()
        remaining = TextColumn("left"), TimeRemainingColumn()
        self.bar = Progress(*description, *columns, *remaining, console=console, disable=not self.live)
        self.task: TaskID | None = None
        self.refreshed_at = 0.0
        self.accuracy: float | None = None  # in the last epoch

    def __enter__(self) -> Self:
        self.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.stop()
        self.log.finish()

    def say(self, text: str) -> None:
        """Print a line. If the output pipe is closed, save and stop the run as on SIGTERM."""
        if self.silent:
            return
        try:
            self.console.print(text, highlight=False, markup=False, soft_wrap=True)
        except (BrokenPipeError, SystemExit):  # rich turns a BrokenPipeError into a SystemExit
            self.silent = True
            signal.raise_signal(signal.SIGTERM)

    def step(self, tally: EpochTally, recipe: Recipe) -> None:
        """Update the progress bar after a step."""
        if not self.live or time.monotonic() - self.refreshed_at < REFRESH_SECONDS:
            return
        self.refreshed_at, sparsifier, clock = time.monotonic(), tally.sparsifier, tally.sparsifier.clock
        if self.task is None:
            self.task = self.bar.add_task(self.name, total=clock.total, text="")
        loss = float(torch.stack(tally.losses[-20:]).mean())
        accuracy = f"  accuracy {self.accuracy:.2%}" if self.accuracy is not None else ""
        text = f"epoch {tally.epoch + 1}/{recipe.epochs}  loss {loss:.3f}{accuracy}"
        if self.wide:
            speed = (self.bar.tasks[self.task].speed or 0.0) * recipe.batch_size
            text += f"  sparsity {sparsifier.sparsity:.2%}  {speed:,.0f} images/s"
        self.bar.update(self.task, completed=clock.step, text=text)

    def epoch(self, row: dict[str, Any], epochs: int) -> None:
        """Report an epoch's metrics: as a line unless there is a progress bar, and to the loggers."""
        self.accuracy = row["accuracy"]
        if not self.live:
            measured = "validation " if "measured_on" in row else ""
            unreadable = f"  unreadable images: {row['unreadable']}" if row["unreadable"] else ""
            self.say(
                f"epoch {row['epoch']}/{epochs}  loss {row['loss']:.4f}  {measured}accuracy {row['accuracy']:.2%}  "
                f"sparsity {row['sparsity']:.2%}  {row['images_per_second']:,.0f} images/s{unreadable}"
            )
        self.log.log(row)
