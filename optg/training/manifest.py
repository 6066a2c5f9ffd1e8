"""manifest.json: the size and SHA-256 of the files of a run, so that a changed file shows.

`recipe.toml` is listed when training starts; `model.safetensors`, `summary.json` and the rows of `metrics.jsonl` when it ends,
and `int8-ranges.safetensors` with them if the run has one.
Until then the run is unfinished. A file is taken off the list before it is replaced, so a kill never looks like damage. Folders
of older versions have no manifest.
"""

import hashlib
import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from optg.files import Fingerprint, atomic_file, exists, read_bytes
from optg.training.errors import DamagedFile
from optg.training.metrics import Head

MANIFEST, RECIPE, SUMMARY, MODEL = "manifest.json", "recipe.toml", "summary.json", "model.safetensors"
RANGES = "int8-ranges.safetensors"  # the ranges of activations, written with --quantize int8
VERSION = 1


@dataclass
class Manifest:
    files: dict[str, Fingerprint] = field(default_factory=dict)
    metrics: Head | None = None  # None until training has ended

    @classmethod
    def read(cls, folder: Path) -> "Manifest | None":
        """Return the manifest of a run folder, None if there is none. Raise DamagedFile if it is damaged."""
        path = folder / MANIFEST
        if not exists(path):
            return None
        data = read_bytes(path)
        try:
            body = json.loads(data)
            if body.pop("checksum") != checksum(body):
                raise DamagedFile("its checksum is wrong")
            if body["version"] != VERSION:
                raise ValueError(f"{path} has version {body['version']}; this optg reads version {VERSION}. Use a newer optg")
            return cls({name: Fingerprint(**entry) for name, entry in body["files"].items()}, Head.parse(body["metrics"]))
        except DamagedFile as error:
            raise DamagedFile(f"{path} is damaged: {error}") from None
        except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise DamagedFile(f"{path} is damaged: {type(error).__name__}: {error}") from None

    def write(self, folder: Path) -> None:
        files = {name: asdict(entry) for name, entry in self.files.items()}
        body = {"version": VERSION, "files": files, "metrics": self.metrics and self.metrics.to_json()}
        with atomic_file(folder / MANIFEST) as file:
            file.write((json.dumps({**body, "checksum": checksum(body)}, indent=2) + "\n").encode())

    def check(self, path: Path, found: Fingerprint) -> None:
        """Raise DamagedFile if a listed file is not what was written."""
        listed = self.files.get(path.name, found)
        if found.size != listed.size:
            raise DamagedFile(f"{path} is damaged: it has {found.size:,} bytes; {MANIFEST} lists {listed.size:,}")
        if found != listed:
            raise DamagedFile(f"{path} is damaged: its SHA-256 differs from the one in {MANIFEST}")

    def check_rows(self, path: Path, head: Head) -> None:
        """Raise DamagedFile if the metrics have changed since training ended."""
        if self.metrics and head != self.metrics:
            raise DamagedFile(
                f"{path} is damaged: its intact rows ({head.rows}) are not those that {MANIFEST} lists ({self.metrics.rows})"
            )


def checksum(body: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
