"""The interface of a logger, and several of them as one."""

import warnings
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

SCALARS = ("loss", "test_loss", "accuracy", "sparsity", "lr", "score_lr", "images_per_second")


class Logger(ABC):
    """Send the metrics of a run somewhere. Only the first process of a run has loggers."""

    name: ClassVar[str]  # as in --log NAME and optg[NAME]
    package: ClassVar[str]  # the module it imports
    hint: ClassVar[str] = ""  # what most often helps if it cannot start

    def __init__(self, folder: Path) -> None:
        self.folder = folder  # the run folder

    @abstractmethod
    def start(self, run: str, settings: dict[str, Any]) -> None:
        """Begin to log a run, or continue after an interruption. Called once, before training."""

    @abstractmethod
    def log(self, epoch: int, metrics: dict[str, float]) -> None:
        """Log the metrics of an epoch. After an interruption some epochs are trained and logged again."""

    @abstractmethod
    def finish(self) -> None:
        """Close everything: training has ended or was interrupted. Called once, after `start`."""


class RunLog:
    """All loggers of a run. One that fails during training is dropped with a warning; training goes on."""

    def __init__(self, loggers: Sequence[Logger] = ()) -> None:
        self.loggers = list(loggers)
        self.started: list[Logger] = []

    def start(self, run: str, settings: dict[str, Any]) -> None:
        for logger in self.loggers:
            try:
                logger.start(run, settings)
            except Exception as error:
                hint = f". {logger.hint}" if logger.hint else ""
                raise ValueError(f"--log {logger.name} cannot start: {first_line(error).rstrip('.')}{hint}") from error
            self.started.append(logger)

    def log(self, row: dict[str, Any]) -> None:
        """Log a row of metrics.jsonl."""
        metrics = {name: row[name] for name in SCALARS if name in row}
        for logger in list(self.started):
            try:
                logger.log(row["epoch"], metrics)
            except Exception as error:
                self.started.remove(logger)
                warnings.warn(
                    f"--log {logger.name} failed and was switched off: {first_line(error)}. metrics.jsonl has all metrics",
                    stacklevel=2,
                )

    def finish(self) -> None:
        for logger in self.started:
            try:
                logger.finish()
            except Exception as error:
                warnings.warn(f"--log {logger.name} could not finish: {first_line(error)}", stacklevel=2)
        self.started = []


def first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)
