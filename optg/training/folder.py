"""The folder of a run: its recipe, metrics, summary, model and checkpoints. One live process at a time may use it."""

import fcntl
import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from torch import Tensor

from optg.files import sync
from optg.training.checkpoint import write_tensors


class InUse(Exception):
    """Another live process trains in this folder."""


class RunFolder:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.checkpoints = path / "checkpoints"

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the folder. The lock is the kernel's and ends with the process, however it ends."""
        self.path.mkdir(parents=True, exist_ok=True)
        with (self.path / ".lock").open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise InUse(f"{self.path} is in use by another process; wait for it, or give another --output") from None
            yield

    def write(self, name: str, text: str) -> None:
        """A file that is there whole or not at all."""
        partial = self.path / f".{name}.partial"
        partial.write_text(text)
        sync(partial)
        self.put(partial, name)

    def write_tensors(self, name: str, tensors: dict[str, Tensor]) -> None:
        partial = self.path / f".{name}.partial"
        write_tensors(partial, tensors)
        self.put(partial, name)

    def put(self, partial: Path, name: str) -> None:
        partial.rename(self.path / name)
        sync(self.path)

    def log(self, row: dict[str, Any]) -> None:
        """One more line of metrics, on the disk before a checkpoint says that its epoch is done."""
        path = self.path / "metrics.jsonl"
        with path.open("a") as file:
            file.write(json.dumps(row) + "\n")
        sync(path)

    def forget_after(self, step: int) -> None:
        """Drop metrics of steps that will be done again, and lines that were cut off or damaged."""
        if (self.path / "metrics.jsonl").exists():
            self.write("metrics.jsonl", "".join(json.dumps(row) + "\n" for row in self.metrics() if row["step"] <= step))

    def metrics(self) -> list[dict[str, Any]]:
        """The rows that are whole."""
        path, rows = self.path / "metrics.jsonl", []
        for line in path.read_text(errors="replace").splitlines() if path.exists() else ():
            with suppress(ValueError):
                row = json.loads(line)
                if isinstance(row, dict) and isinstance(row.get("step"), int) and "seconds" in row:
                    rows.append(row)
        return rows


def in_use(path: Path) -> bool:
    """Does a live process hold the folder of a run?"""
    try:
        with (path / ".lock").open("r+") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False


def is_run(path: Path) -> bool:
    return (path / "recipe.toml").is_file()
