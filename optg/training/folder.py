"""The folder of a run: its recipe, metrics, summary, model and checkpoints. One live process at a time may use it."""

import fcntl
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor

from optg.training.checkpoint import sync, write_tensors


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
        """One more line of metrics."""
        with (self.path / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(row) + "\n")

    def forget_after(self, step: int) -> None:
        """Drop metrics of steps that will be done again, and a line that was cut off."""
        path = self.path / "metrics.jsonl"
        if not path.exists():
            return
        rows = []
        for line in path.read_text().splitlines():
            try:
                row = json.loads(line)
            except ValueError:
                continue
            if row["step"] <= step:
                rows.append(line + "\n")
        self.write("metrics.jsonl", "".join(rows))

    def metrics(self) -> list[dict[str, Any]]:
        path = self.path / "metrics.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


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
