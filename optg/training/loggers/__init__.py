"""Loggers by name: `optg train --log NAME`. To add one, write one file and add one line here.

`metrics.jsonl` has all metrics, with or without loggers.
"""

from collections.abc import Iterable
from importlib import import_module
from pathlib import Path

from optg.training.loggers.base import SCALARS, Logger, RunLog
from optg.training.loggers.mlflow import MLflow
from optg.training.loggers.tensorboard import TensorBoard
from optg.training.loggers.wandb import WandB

LOGGERS: dict[str, type[Logger]] = {logger.name: logger for logger in (TensorBoard, WandB, MLflow)}

__all__ = ["LOGGERS", "SCALARS", "Logger", "RunLog", "make_loggers"]


def make_loggers(names: Iterable[str], folder: Path) -> list[Logger]:
    """Return the named loggers of a run folder, or raise an error that says what to install."""
    kinds = [LOGGERS[name] for name in dict.fromkeys(names)]
    for kind in kinds:
        require(kind)
    return [kind(folder) for kind in kinds]


def require(kind: type[Logger]) -> None:
    """Raise an error that says what to install if a logger's package is missing."""
    reason = f"{kind.package} is not installed"
    try:
        if import_module(kind.package).__file__:  # None for a plain folder of that name: wandb leaves one behind
            return
    except ImportError as error:
        reason = str(error)
    raise ValueError(f"--log {kind.name} needs a missing package ({reason}); run: pip install 'optg[{kind.name}]'")
