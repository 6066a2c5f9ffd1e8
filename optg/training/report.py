"""What a person sees while a run trains: a progress bar in a terminal, a line for each epoch in a log."""

import signal
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from torch import Tensor

from optg.sparsifier import Sparsifier
from optg.training.board import Board

EVERY = 0.5  # seconds between two looks at the loss: each is a sync


class Report:
    """Silent but in the first process. `board` is the folder of a run that is to be seen in TensorBoard too."""

    def __init__(self, name: str, console: Console, silent: bool = False, board: Path | None = None) -> None:
        self.console, self.silent = console, silent
        self.board_folder = board
        self.board: Board | None = None
        self.live = console.is_terminal and not silent
        self.wide = console.width >= 120  # is there room for all?
        columns = (BarColumn(None if self.wide else 10), TextColumn("{task.fields[text]}"), TimeElapsedColumn())
        description = (TextColumn("{task.description}"),) if self.wide else ()
        left = TextColumn("left"), TimeRemainingColumn()
        self.bar = Progress(*description, *columns, *left, console=console, disable=not self.live)
        self.task: TaskID | None = None
        self.name, self.last = name, 0.0
        self.accuracy: float | None = None

    def __enter__(self) -> "Report":
        self.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.stop()
        if self.board:
            self.board.close()

    def say(self, text: str) -> None:
        """To whoever reads; when they have gone, the run saves and stops, as on SIGTERM."""
        if self.silent:
            return
        try:
            self.console.print(text, highlight=False, soft_wrap=True)
        except (BrokenPipeError, SystemExit):  # rich makes the one of the other
            self.silent = True
            signal.raise_signal(signal.SIGTERM)

    def step(self, sparsifier: Sparsifier, losses: list[Tensor], batch: int) -> None:
        if not self.live or time.monotonic() - self.last < EVERY:
            return
        self.last, clock = time.monotonic(), sparsifier.clock
        if self.task is None:
            self.task = self.bar.add_task(self.name, total=clock.total, text="")
        loss = float(torch.stack(losses[-20:]).mean())
        speed = (self.bar.tasks[self.task].speed or 0.0) * batch
        accuracy = f"  accuracy {self.accuracy:.2%}" if self.accuracy is not None else ""  # none before the first epoch ends
        text = f"epoch {clock.epoch}/{clock.epochs}  loss {loss:.3f}{accuracy}"
        if self.wide:
            text += f"  sparsity {sparsifier.sparsity:.2%}  {speed:,.0f} images/s"
        self.bar.update(self.task, completed=clock.step, text=text)

    def metrics(self, row: dict[str, Any], epochs: int) -> None:
        self.accuracy = row["accuracy"]
        if not self.live:
            unreadable = f"  unreadable images: {row['unreadable']}" if row["unreadable"] else ""
            self.say(
                f"epoch {row['epoch']}/{epochs}  loss {row['loss']:.4f}  accuracy {row['accuracy']:.2%}  "
                f"sparsity {row['sparsity']:.2%}  {row['images_per_second']:,.0f} images/s{unreadable}"
            )
        if self.board_folder:
            self.board = self.board or Board(self.board_folder, row["epoch"])
            self.board.write(row)
