"""Read the files of a run folder, each checked against the manifest when it is opened."""

import warnings
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import Tensor

from optg.files import Fingerprint, exists, fingerprint, load_json, read_bytes
from optg.training.errors import DamagedFile
from optg.training.manifest import MANIFEST, MODEL, SUMMARY, Manifest
from optg.training.metrics import METRICS, Rows, read_rows
from optg.training.tensors import read_tensors


class RunFiles:
    """The files of a run folder. Reading a damaged one raises DamagedFile; any other error of reading is an OSError."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.manifest = Manifest.read(path)
        if self.manifest is None and self.rows.chained and self.rows.intact:
            raise DamagedFile(f"{path} has lost its {MANIFEST}, so its files cannot be checked")

    @property
    def is_old(self) -> bool:
        """Whether an older version wrote the folder, so that nothing can be checked."""
        return self.manifest is None

    @property
    def finished(self) -> bool:
        """Whether training has ended and its files are all there."""
        return self.has(SUMMARY) and self.has(MODEL)

    def has(self, name: str) -> bool:
        """Return whether a file is there and complete. One that the manifest does not list is not complete yet."""
        return exists(self.path / name) and (self.manifest is None or name in self.manifest.files)

    def warn_if_old(self) -> None:
        if self.is_old:
            warnings.warn(
                f"{self.path} has no {MANIFEST}: an older version wrote it, so its files cannot be checked", stacklevel=2
            )

    def read(self, name: str) -> bytes:
        """Return the contents of a file."""
        data = read_bytes(self.path / name)
        self.check(name, Fingerprint.of(data))
        return data

    def check(self, name: str, found: Fingerprint | None = None) -> None:
        """Raise DamagedFile if a file is not what was written."""
        if self.manifest:
            self.manifest.check(self.path / name, found or fingerprint(self.path / name))

    def summary(self) -> Any:
        """Return the contents of summary.json."""
        try:
            return load_json(self.read(SUMMARY))
        except DamagedFile:
            raise
        except (ValueError, RecursionError) as error:
            raise DamagedFile(f"{self.path / SUMMARY} is damaged: {error}") from None

    def tensors(self, name: str) -> dict[str, Tensor]:
        """Return the tensors of a safetensors file."""
        tensors, found = read_tensors(self.path / name)
        self.check(name, found)
        return tensors

    @cached_property
    def rows(self) -> Rows:
        """The rows of metrics.jsonl. They are not checked against the manifest."""
        found = read_rows(self.path / METRICS)
        if not found.chained and self.manifest and self.manifest.files:
            found.problems.append("no row has a checksum")
        return found

    def intact_rows(self) -> list[dict[str, Any]]:
        """Return the rows of metrics.jsonl, or raise DamagedFile if any of them is damaged or lost."""
        if self.rows.problems:
            raise DamagedFile(f"{self.path / METRICS}, {self.rows.problems[0]}")
        if self.manifest:
            self.manifest.check_rows(self.path / METRICS, self.rows.head)
        return self.rows.intact
