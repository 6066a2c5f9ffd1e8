"""metrics.jsonl: one row for each epoch, each with a checksum that also covers the row before.

So a changed or lost row is detected. Rows lost at the end are detected too: checkpoints and the manifest hold the `Head`.
"""

import hashlib
import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from optg.files import atomic_file, create, exists, free_name, naming, read_bytes, refuse_link, sync
from optg.training.errors import DamagedFile

METRICS = "metrics.jsonl"


@dataclass(frozen=True)
class Head:
    """The number of rows, and the checksum of the last one."""

    rows: int = 0
    checksum: str = ""

    @classmethod
    def parse(cls, value: Any) -> "Head | None":
        """Return a head from JSON; None if an older version wrote the file."""
        if value is None:
            return None
        if not isinstance(value, dict) or type(value.get("rows")) is not int or not isinstance(value.get("checksum"), str):
            raise DamagedFile(f"its record of {METRICS} is {value!r}; expected the number of rows and a checksum")
        return cls(value["rows"], value["checksum"])

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass
class Rows:
    """The contents of a metrics file."""

    intact: list[dict[str, Any]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)  # one text for each damaged line
    chained: bool = True  # False: all rows lack checksums, because an older version wrote them
    cut_off: bool = False  # the last line has no end: the process was killed while writing it

    @property
    def head(self) -> Head:
        return Head(len(self.intact), self.intact[-1].get("checksum", "") if self.intact else "")


def read_rows(path: Path) -> Rows:
    """Read a metrics file; a missing one has no rows. A row is damaged if its checksum does not follow from the row before."""
    if not exists(path):
        return Rows()
    *lines, rest = read_bytes(path).split(b"\n")
    parsed = [parse_row(line) for line in lines]
    found = Rows(chained=not parsed or any("checksum" in row for row in parsed if isinstance(row, dict)), cut_off=bool(rest))
    before = ""
    for number, (line, row) in enumerate(zip(lines, parsed), 1):
        if isinstance(row, str):
            found.problems.append(f"line {number} is damaged: {row}")
            continue
        if found.chained and (row.get("checksum") != link(row, before) or as_text([row]) != line + b"\n"):
            found.problems.append(f"line {number} is damaged, or the line before it is lost: its checksum is wrong")
        else:
            found.intact.append(row)
        before = str(row.get("checksum", ""))
    return found


def parse_row(line: bytes) -> dict[str, Any] | str:
    """Return the row in a line, or the reason why the line is damaged."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        return str(error)
    return row if isinstance(row, dict) else f"it holds a {type(row).__name__}; expected a table of names and values"


def link(row: dict[str, Any], before: str) -> str:
    """Return the checksum of a row that follows a row with the checksum `before`."""
    content = {key: value for key, value in row.items() if key != "checksum"}
    return hashlib.sha256((before + json.dumps(content, sort_keys=True)).encode()).hexdigest()


def chain(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows with new checksums."""
    chained, before = [], ""
    for row in rows:
        before = link(row, before)
        chained.append({**row, "checksum": before})
    return chained


def as_text(rows: list[dict[str, Any]]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


class MetricsFile:
    """The metrics file of a run that is training. Only the process that holds the folder's lock may write it."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / METRICS
        self.rows: list[dict[str, Any]] = []  # all rows so far, once `rewind` was called

    @property
    def head(self) -> Head:
        return Rows(self.rows).head

    @property
    def is_empty(self) -> bool:
        refuse_link(self.path)
        return not exists(self.path) or os.lstat(self.path).st_size == 0

    def append(self, row: dict[str, Any]) -> None:
        """Add a row, synced to disk before a checkpoint can claim that its epoch is done."""
        row = {**row, "checksum": link(row, self.head.checksum)}
        is_new, flags = not exists(self.path), os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        with naming(self.path), os.fdopen(os.open(self.path, flags, 0o666), "ab") as file:
            file.write(as_text([row]))
        sync(self.path)
        if is_new:
            sync(self.path.parent)
        self.rows.append(row)

    def upgrade(self) -> None:
        """Add checksums to rows that an older version wrote."""
        found = read_rows(self.path)
        if not found.chained and not found.problems:
            self.write(chain(found.intact))

    def rewind(self, step: int, head: Head | None) -> str | None:
        """Remove the rows of steps that will be trained again. Return a warning if earlier rows are lost.

        `head` is what the checkpoint of this step knows. If rows are lost, the file as it was is kept beside the new one.
        """
        found = read_rows(self.path)
        kept = [row for row in found.intact if type(row.get("step")) is int and row["step"] <= step]
        self.rows = chain(kept)  # changes nothing, unless rows are lost
        lost = bool(found.problems) if head is None else Rows(kept).head != head
        aside = self.copy_aside() if lost else None
        self.write(self.rows)
        if not lost:
            return None
        left = f"{len(kept)} of {head.rows}" if head else str(len(kept))
        beside = f"; the file as it was: {aside.name}" if aside else ""
        return f"{METRICS} is damaged: {left} rows before step {step} are intact. Training goes on without the others{beside}"

    def write(self, rows: list[dict[str, Any]]) -> None:
        """Replace the file, unless it has these rows already."""
        if (read_bytes(self.path) if exists(self.path) else b"") != as_text(rows):
            with atomic_file(self.path) as file:
                file.write(as_text(rows))

    def copy_aside(self) -> Path | None:
        """Copy the file to a free name that ends in `.damaged`."""
        if not exists(self.path):
            return None
        aside = free_name(self.path.with_name(f"{METRICS}.damaged"))
        with naming(aside), create(aside) as file:
            file.write(read_bytes(self.path))
        sync(aside)
        return aside
