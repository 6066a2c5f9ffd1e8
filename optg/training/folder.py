"""The folder of a run: its recipe, metrics, summary, model and checkpoints. Only one live process may train in it."""

import fcntl
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torch import Tensor

from optg.files import SET_ASIDE, Fingerprint, atomic_file, exists, is_real_file, list_names, refuse_link, sync
from optg.training.errors import FolderInUse
from optg.training.manifest import MANIFEST, MODEL, RANGES, RECIPE, SUMMARY
from optg.training.metrics import METRICS, MetricsFile
from optg.training.tensors import write_tensors

LOCK, CHECKPOINTS, PREVIOUS = ".lock", "checkpoints", "previous"
FOLDERS = (CHECKPOINTS, "tensorboard", "wandb")
# All that belongs to one training, in the order in which `--fresh` moves it: a kill leaves no checkpoint without a recipe.
CONTENTS = (*FOLDERS, "wandb-run-id", "mlflow-run-id", MODEL, RANGES, SUMMARY, METRICS, RECIPE, MANIFEST)
LEFTOVER = re.compile(rf"\.({'|'.join(map(re.escape, CONTENTS))})\.\d+\.partial(-\d+)?")


class RunFolder:
    def __init__(self, path: Path) -> None:
        if path.is_file():
            raise NotADirectoryError(f"{path} is a file; expected a folder for the run")
        self.path = path
        self.checkpoints = path / CHECKPOINTS
        self.metrics = MetricsFile(path)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Create the folder and hold its lock. The kernel releases the lock when the process ends, however it ends."""
        self.path.mkdir(parents=True, exist_ok=True)
        for name in FOLDERS:
            refuse_link(self.path / name)
        with open_lock(self.path, os.O_RDWR | os.O_CREAT) as handle:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise FolderInUse(
                    f"{self.path} is in use by another process; wait for it to finish, or give another --output"
                ) from None
            yield

    def write(self, name: str, text: str) -> Fingerprint:
        """Write a text file atomically."""
        with atomic_file(self.path / name) as file:
            file.write(text.encode())
        return file.fingerprint

    def write_tensors(self, name: str, tensors: dict[str, Tensor]) -> Fingerprint:
        """Write a safetensors file atomically."""
        with atomic_file(self.path / name) as file:
            write_tensors(file, tensors)
        return file.fingerprint

    def move_aside(self) -> Path | None:
        """Move everything that belongs to an earlier training into a new folder `previous-N`. None if there is nothing."""
        damaged = [name for name in list_names(self.path) if SET_ASIDE.fullmatch(name)]
        found = [name for name in (*damaged, *CONTENTS) if exists(self.path / name)]
        if not found:
            return None
        number = 1 + max(int(name.rpartition("-")[2]) for name in ["previous-0", *list_names(self.path)] if is_previous(name))
        aside = self.path / f"{PREVIOUS}-{number}"
        aside.mkdir()
        for name in found:
            os.rename(self.path / name, aside / name)
        sync(aside)
        sync(self.path)
        return aside

    def delete_leftovers(self) -> None:
        """Delete files that a process left when it died while writing them."""
        for name in list_names(self.path):
            if LEFTOVER.fullmatch(name) and is_real_file(self.path / name):
                (self.path / name).unlink()


def is_previous(name: str) -> bool:
    return re.fullmatch(rf"{PREVIOUS}-\d+", name) is not None


@contextmanager
def open_lock(path: Path, flags: int) -> Iterator[int]:
    """Open the lock file of a run folder. Do not follow a link or change what the file holds."""
    try:
        handle = os.open(path / LOCK, os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | flags, 0o666)
    except OSError:
        refuse_link(path / LOCK)
        raise
    try:
        yield handle
    finally:
        os.close(handle)


def in_use(path: Path) -> bool:
    """Return whether a live process holds a run folder's lock. The folder may be on a disk that can only be read."""
    try:
        with open_lock(path, os.O_RDONLY) as handle:
            fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False


def is_run(path: Path) -> bool:
    """Return whether a folder holds a run."""
    return (path / RECIPE).is_file()
