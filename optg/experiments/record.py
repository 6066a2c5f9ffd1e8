"""Summaries of runs, kept beyond the runs: one a line in results/*.jsonl."""

import contextlib
import fcntl
import json
import math
import os
from pathlib import Path
from typing import Any

from optg.experiments.declaration import key_of
from optg.report.runs import REQUIRED, SETTINGS, require

Summaries = dict[str, dict[str, Any]]  # by what makes a run what it is
NEEDED = REQUIRED | dict.fromkeys(("recipe", "command", "hardware"), str) | dict.fromkeys(("options", "versions"), dict)
NEEDED |= dict.fromkeys(("flops", "seconds"), float)


def read(path: Path) -> list[dict[str, Any]]:
    """The lines of a file; one that was cut off at the end is passed over."""
    if not path.exists():
        return []
    rows = []
    try:
        lines = path.read_text().split("\n")
    except UnicodeDecodeError:
        raise ValueError(f"{path} is not text; expected the summary.json of a run in each line") from None
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line) if line.strip() else None
        except ValueError:
            row = None
            if number < len(lines):
                raise ValueError(f"{path}, line {number}, is not JSON; expected the summary.json of a run") from None
        if row is not None:
            rows.append(checked(row, f"{path}, line {number}"))
    return rows


def checked(row: Any, where: str) -> dict[str, Any]:
    require(row, NEEDED, where)
    require(row["versions"], {"torch": str}, f"{where}: versions")
    require(row["settings"], SETTINGS | {"batch_size": int}, f"{where}: settings")
    if not all(math.isfinite(row[key]) for key, kind in NEEDED.items() if kind is float) or row["settings"]["epochs"] < 1:
        raise ValueError(f"{where} has a number that no run leaves; expected finite ones, and at least one epoch")
    try:
        key_of(row)
    except TypeError:
        raise ValueError(f"{where} has settings that no run can have: {row['settings']}") from None
    return row


def append(path: Path, summary: dict[str, Any]) -> bool:
    """Add a run as one whole line, unless the file has it; what another process cut off there goes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        if key_of(summary) in {key_of(row) for row in read(path)}:
            return False
        file.seek(0)
        text = file.read()
        if last := text[text.rfind(b"\n") + 1 :]:
            try:
                json.loads(last)
                file.write(b"\n")
            except ValueError:
                file.truncate(len(text) - len(last))
        file.write(json.dumps(summary, ensure_ascii=False).encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())
        return True


def beside(path: Path | None) -> Summaries:
    """The runs of a record and of all others in its folder; what is no record there is passed over."""
    if path is None:
        return {}
    if path.suffix != ".jsonl":
        raise ValueError(f"--record is {path}; expected a file whose name ends in .jsonl")
    return within(path.parent, path)


def within(folder: Path, named: Path | None = None) -> Summaries:
    """The runs of all records in a folder, by the first that has them; what is no record is passed over, but for one named."""
    found: Summaries = {}
    for path in sorted(folder.glob("*.jsonl")):
        try:
            found = {key_of(row): row for row in read(path)} | found
        except (ValueError, OSError):
            if path == named or has_a_run(path):
                raise
    return found


def has_a_run(path: Path) -> bool:
    """Is a file that cannot be read a damaged record, rather than something else?"""
    try:
        lines = path.read_text(errors="replace").split("\n")
    except OSError:
        return False
    for line in lines:
        with contextlib.suppress(ValueError):
            return bool(checked(json.loads(line), str(path)))
    return False


def known(output: Path, recorded: Summaries) -> Summaries:
    """Every run that has ended, in a record or in the folder of runs."""
    found: Summaries = {}
    for path in sorted(output.glob("*/summary.json")):
        try:
            summary = checked(json.loads(path.read_text(errors="replace")), str(path))
        except json.JSONDecodeError as error:
            raise ValueError(f"{path} is damaged ({error}); delete it, and its run ends again from its checkpoint") from None
        found[key_of(summary)] = summary
    return found | recorded
