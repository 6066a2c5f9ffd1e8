"""Record files (results/*.jsonl) keep the summaries of finished runs, one per line, after the run folders are gone."""

import contextlib
import fcntl
import json
import math
import os
import warnings
from pathlib import Path
from typing import Any

from optg.experiments.planned_run import run_key
from optg.report.runs import REQUIRED, SETTINGS, parse_json, require
from optg.training.errors import DamagedFile
from optg.training.manifest import MANIFEST, SUMMARY
from optg.training.run_files import RunFiles

Summaries = dict[str, dict[str, Any]]  # summaries by their run_key
SUMMARY_TYPES = REQUIRED | dict.fromkeys(("recipe", "command", "hardware"), str) | dict.fromkeys(("options", "versions"), dict)
SUMMARY_TYPES |= dict.fromkeys(("flops", "seconds"), float)


def read_records(path: Path) -> list[dict[str, Any]]:
    """Return the summaries in a record file. A last line that was cut off is skipped."""
    if not path.exists():
        return []
    summaries = []
    try:
        lines = path.read_text().split("\n")
    except UnicodeDecodeError:
        raise ValueError(f"{path} is not text; expected the summary.json of a run in each line") from None
    for number, line in enumerate(lines, 1):
        try:
            summary = parse_json(line, f"{path}, line {number}") if line.strip() else None
        except ValueError:
            summary = None
            if number < len(lines):
                raise ValueError(f"{path}, line {number}, is not JSON; expected the summary.json of a run") from None
        if summary is not None:
            summaries.append(check_summary(summary, f"{path}, line {number}"))
    return summaries


def check_summary(summary: Any, where: str) -> dict[str, Any]:
    """Return the summary, or raise if a run cannot have written it."""
    require(summary, SUMMARY_TYPES, where)
    require(summary["versions"], {"torch": str}, f"{where}: versions")
    require(summary["settings"], SETTINGS | {"batch_size": int}, f"{where}: settings")
    finite = all(math.isfinite(summary[key]) for key, kind in SUMMARY_TYPES.items() if kind is float)
    if not finite or summary["settings"]["epochs"] < 1:
        raise ValueError(f"{where} has an impossible number; expected finite numbers and at least one epoch")
    try:
        run_key(summary)
    except TypeError:
        raise ValueError(f"{where} has impossible settings: {summary['settings']}") from None
    return summary


def append_record(path: Path, summary: dict[str, Any]) -> bool:
    """Append a summary as one whole line, unless the file already has its run. Replace a last line that was cut off."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        if run_key(summary) in {run_key(other) for other in read_records(path)}:
            return False
        file.seek(0)
        text = file.read()
        if last := text[text.rfind(b"\n") + 1 :]:
            try:
                parse_json(last, str(path))
                file.write(b"\n")
            except ValueError:
                file.truncate(len(text) - len(last))
        file.write(json.dumps(summary, ensure_ascii=False).encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())
        return True


def records_beside(path: Path | None) -> Summaries:
    """Return the runs of a record file and of all other record files in its folder."""
    if path is None:
        return {}
    if path.suffix != ".jsonl":
        raise ValueError(f"--record is {path}; expected a file whose name ends in .jsonl")
    return records_in(path.parent, path)


def records_in(folder: Path, required: Path | None = None) -> Summaries:
    """Return the runs of all record files in a folder; the first file that has a run wins.

    Files that are not records are skipped, but a damaged record or a bad `required` file raises.
    """
    summaries: Summaries = {}
    for path in sorted(folder.glob("*.jsonl")):
        try:
            summaries = {run_key(summary): summary for summary in read_records(path)} | summaries
        except (ValueError, OSError):
            if path == required or has_a_record(path):
                raise
    return summaries


def has_a_record(path: Path) -> bool:
    """Return whether any line of an unreadable file is a summary: if so, the file is a damaged record."""
    try:
        lines = path.read_text(errors="replace").split("\n")
    except OSError:
        return False
    for line in lines:
        with contextlib.suppress(ValueError):
            return bool(check_summary(parse_json(line, str(path)), str(path)))
    return False


def finished_runs(output: Path, recorded: Summaries) -> Summaries:
    """Return every finished run that is recorded or has its folder in `output`."""
    summaries: Summaries = {}
    old = 0
    for path in sorted(output.glob(f"*/{SUMMARY}")):
        try:
            summary, is_old = read_summary(path.parent)
        except DamagedFile as error:
            raise ValueError(f"{error}. To finish the run again, give its command from logs/{path.parent.name}.log") from None
        old += is_old
        if summary is not None:
            summaries[run_key(summary)] = summary
    if old:
        warnings.warn(
            f"{old} runs in {output} have no {MANIFEST}: an older version wrote them, so they cannot be checked", stacklevel=2
        )
    return summaries | recorded


def read_summary(folder: Path) -> tuple[dict[str, Any] | None, bool]:
    """Return the checked summary of a run folder, None if the run has not finished; and whether an older version wrote it."""
    files = RunFiles(folder)
    if not files.has(SUMMARY):
        return None, files.is_old
    return check_summary(files.summary(), str(folder / SUMMARY)), files.is_old
