"""The folder of a run: its recipe, metrics, summary, model and checkpoints. Only one live process may train in it."""

import fcntl
import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from torch import Tensor

from optg.files import atomic_write, sync
from optg.training.checkpoint import write_tensors
from optg.training.errors import FolderInUse


class RunFolder:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.checkpoints = path / "checkpoints"

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Create the folder and hold its lock. The kernel releases the lock when the process ends, however it ends."""
        self.path.mkdir(parents=True, exist_ok=True)
        with (self.path / ".lock").open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise FolderInUse(
                    f"{self.path} is in use by another process; wait for it to finish, or give another --output"
                ) from None
            yield

    def write(self, name: str, text: str) -> None:
        """Write a text file atomically."""
        with atomic_write(self.path / name) as partial:
            partial.write_text(text)

    def write_tensors(self, name: str, tensors: dict[str, Tensor]) -> None:
        """Write a safetensors file atomically."""
        with atomic_write(self.path / name) as partial:
            write_tensors(partial, tensors)

    def append_metrics(self, row: dict[str, Any]) -> None:
        """Add a row to metrics.jsonl, synced to disk before a checkpoint can claim that its epoch is done."""
        path = self.path / "metrics.jsonl"
        with path.open("a") as file:
            file.write(json.dumps(row) + "\n")
        sync(path)

    def drop_metrics_after(self, step: int) -> None:
        """Remove the rows of steps that will be trained again, and damaged rows."""
        if (self.path / "metrics.jsonl").exists():
            self.write("metrics.jsonl", "".join(json.dumps(row) + "\n" for row in self.metrics() if row["step"] <= step))

    def metrics(self) -> list[dict[str, Any]]:
        """Return the intact rows of metrics.jsonl."""
        path, rows = self.path / "metrics.jsonl", []
        for line in path.read_text(errors="replace").splitlines() if path.exists() else ():
            with suppress(ValueError):
                row = json.loads(line)
                if isinstance(row, dict) and isinstance(row.get("step"), int) and "seconds" in row:
                    rows.append(row)
        return rows


def in_use(path: Path) -> bool:
    """Return whether a live process holds a run folder's lock."""
    try:
        with (path / ".lock").open("r+") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False


def is_run(path: Path) -> bool:
    """Return whether a folder holds a run."""
    return (path / "recipe.toml").is_file()
