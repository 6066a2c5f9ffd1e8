"""Check everything in a run folder: what is whole, damaged, missing or cannot be verified, and how to recover it."""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from optg.files import SET_ASIDE, exists, fingerprint, is_real_file, is_real_folder, list_names
from optg.training import checkpoint
from optg.training.errors import DamagedFile
from optg.training.folder import CHECKPOINTS, CONTENTS, LEFTOVER, LOCK, RunFolder, in_use, is_previous
from optg.training.manifest import MANIFEST, MODEL, RANGES, RECIPE, SUMMARY, Manifest
from optg.training.metrics import METRICS, Head, Rows, read_rows
from optg.training.prepare import has_results
from optg.training.run_files import RunFiles

State = Literal["whole", "damaged", "missing", "unverifiable", "set aside", "leftover", "unfinished"]
WRONG = ("damaged", "missing")


@dataclass
class Finding:
    """The state of one file or checkpoint."""

    name: str
    state: State
    detail: str = ""


@dataclass
class Verdict:
    """The state of a run folder."""

    path: Path
    findings: list[Finding] = field(default_factory=list)
    advice: list[str] = field(default_factory=list)  # what can be recovered, and how

    @property
    def is_fine(self) -> bool:
        """Whether nothing is damaged or missing."""
        return not any(finding.state in WRONG for finding in self.findings)

    def add(self, name: str, state: State, detail: str = "") -> None:
        self.findings.append(Finding(name, state, detail))

    def lines(self) -> Iterator[str]:
        """Yield the lines that `optg verify` prints."""
        yield f"{self.path}: {'nothing is damaged' if self.is_fine else 'damaged'}"
        for finding in self.findings:
            yield f"  {finding.state:12}  {finding.name}" + (f": {finding.detail}" if finding.detail else "")
        yield from (f"  {line}" for line in self.advice)


def verify(path: Path, check_export: Callable[[Path], str | None] | None = None) -> Verdict:
    """Check a run folder.

    Args:
        check_export: raises ValueError if a packed file is damaged; returns the reason if it cannot be checked.
    """
    if not any(exists(path / name) for name in (RECIPE, MANIFEST, METRICS, CHECKPOINTS)):
        raise ValueError(f"{path} is not the folder of a run; expected a folder that optg train wrote")
    verdict = Verdict(path)
    if in_use(path):
        verdict.add(LOCK, "unfinished", "a process is training here")
    files = check_manifest(verdict)
    whole = check_checkpoints(verdict)
    for name in (RECIPE, SUMMARY, MODEL):
        check_file(verdict, files, name)
    if exists(path / RANGES) or (files and files.manifest and RANGES in files.manifest.files):
        check_file(verdict, files, RANGES)
    check_metrics(verdict, files, whole)
    check_others(verdict, check_export)
    advise(verdict, files, list(whole))
    return verdict


def check_manifest(verdict: Verdict) -> RunFiles | None:
    """Return the files of the run, None if the manifest cannot be used."""
    try:
        files = RunFiles(verdict.path)
    except DamagedFile as error:
        verdict.add(MANIFEST, "damaged" if exists(verdict.path / MANIFEST) else "missing", short(error, verdict.path))
        return None
    if files.manifest:
        verdict.add(MANIFEST, "whole")
    else:
        verdict.add(MANIFEST, "unverifiable", "missing: an older version wrote this folder, or training has not begun")
    return files


def check_file(verdict: Verdict, files: RunFiles | None, name: str) -> None:
    path, manifest = verdict.path / name, (files.manifest if files else None) or Manifest()
    if name in manifest.files and files and exists(path):
        try:
            files.check(name)
            verdict.add(name, "whole")
        except DamagedFile as error:
            verdict.add(name, "damaged", short(error, verdict.path))
    elif exists(path):
        detail = (
            f"training was interrupted before {MANIFEST} listed it" if files and files.manifest else f"no {MANIFEST} lists it"
        )
        verdict.add(name, "unverifiable", detail)
    elif moved := moved_to(verdict.path, lambda folder: is_same(folder / name, manifest)):
        verdict.add(name, "set aside", moved)
    elif name in manifest.files or (name == RECIPE and has_results(RunFolder(verdict.path))):
        verdict.add(name, "missing")
    elif name == RECIPE:
        verdict.add(name, "unfinished", "training was interrupted before it began")
    elif not (files and files.finished):
        verdict.add(name, "unfinished", "it is written when training ends")


def is_same(path: Path, manifest: Manifest) -> bool:
    """Return whether a file is the one that a manifest lists."""
    return path.name in manifest.files and exists(path) and fingerprint(path) == manifest.files[path.name]


def moved_to(path: Path, has: Callable[[Path], bool]) -> str:
    """Return an explanation if a folder of earlier files has what is missing here; else an empty text."""
    found = [name for name in list_names(path) if is_previous(name) and has(path / name)]
    return f"it is in {found[-1]}, because --fresh was interrupted; give the same command again" if found else ""


def check_checkpoints(verdict: Verdict) -> dict[str, Head | None]:
    """Return the whole checkpoints, and what they know about the rows of metrics."""
    whole: dict[str, Head | None] = {}
    for path in checkpoint.list_checkpoints(verdict.path / CHECKPOINTS):
        try:
            whole[path.name] = Head.parse(checkpoint.check(path).get("metrics"))
            verdict.add(f"{CHECKPOINTS}/{path.name}", "whole")
        except DamagedFile as error:
            if exists(path):  # else a process that trains has deleted it meanwhile
                verdict.add(f"{CHECKPOINTS}/{path.name}", "damaged", str(error))
    return whole


def check_metrics(verdict: Verdict, files: RunFiles | None, whole: dict[str, Head | None]) -> None:
    rows = files.rows if files else None
    if rows is None or not exists(verdict.path / METRICS):
        heads = [head for head in whole.values() if head and head.rows]
        listed = files.manifest.metrics if files and files.manifest else None
        if rows is None and exists(verdict.path / METRICS):
            verdict.add(METRICS, "unverifiable", f"there is no whole {MANIFEST}")
        elif listed and (moved := moved_to(verdict.path, lambda folder: read_rows(folder / METRICS).head == listed)):
            verdict.add(METRICS, "set aside", moved)
        elif heads or (listed and listed.rows):
            verdict.add(METRICS, "missing")
        return
    assert files is not None
    problems = [*rows.problems, *lost_rows(rows, files.manifest, whole)]
    if problems:
        verdict.add(METRICS, "damaged", "; ".join(problems))
    elif not rows.chained:
        verdict.add(METRICS, "unverifiable", "an older version wrote it, without checksums")
    else:
        cut_off = ", and an incomplete line" if rows.cut_off else ""
        verdict.add(METRICS, "whole", f"{len(rows.intact)} row{'' if len(rows.intact) == 1 else 's'}{cut_off}")


def lost_rows(rows: Rows, manifest: Manifest | None, whole: dict[str, Head | None]) -> Iterator[str]:
    """Yield what the end of the rows, the checkpoints and the epochs say about lost rows."""
    if manifest and manifest.metrics and rows.head != manifest.metrics:
        yield f"its intact rows ({len(rows.intact)}) are not those that {MANIFEST} lists ({manifest.metrics.rows})"
    for name, head in whole.items() if rows.chained else ():
        if head and Rows(rows.intact[: head.rows]).head != head:
            yield f"{name} was saved after {head.rows} rows, which are lost or changed"
    epochs = [row.get("epoch") for row in rows.intact]
    if rows.chained and not rows.problems and epochs != list(range(1, len(epochs) + 1)):
        yield f"it has the epochs {', '.join(map(str, epochs[:20]))}; expected all epochs from 1 on"


def check_others(verdict: Verdict, check_export: Callable[[Path], str | None] | None) -> None:
    """Add what is in the folder besides the files of the run."""
    inside = [f"{CHECKPOINTS}/{name}" for name in list_names(verdict.path / CHECKPOINTS)]
    known = {finding.name for finding in verdict.findings} | {LOCK, CHECKPOINTS, *CONTENTS}
    for name in [name for name in (*list_names(verdict.path), *inside) if name not in known]:
        last = name.rpartition("/")[2]
        if SET_ASIDE.fullmatch(last):
            verdict.add(name, "set aside", "it was found damaged earlier; delete it when you no longer need it")
        elif (LEFTOVER.fullmatch(last) and is_real_file(verdict.path / name)) or (
            checkpoint.PARTIAL.fullmatch(last) and checkpoint.is_ours(verdict.path / name)
        ):
            verdict.add(name, "leftover", "a process died while writing it; training deletes it")
        elif is_previous(name):
            verdict.add(name, "set aside", f"an earlier training; check it with optg verify {verdict.path / name}")
        elif name.endswith(".optg") and check_export and is_real_file(verdict.path / name):
            try:
                reason = check_export(verdict.path / name)
                verdict.add(name, "unverifiable" if reason else "whole", short(reason or "", verdict.path))
            except ValueError as error:
                verdict.add(name, "damaged", short(error, verdict.path))
        else:
            kind = "folder" if is_real_folder(verdict.path / name) else "file"
            verdict.add(name, "unverifiable", f"optg did not record a checksum of this {kind}")


def advise(verdict: Verdict, files: RunFiles | None, whole: list[str]) -> None:
    """Say what can be recovered, and how."""
    wrong = {finding.name for finding in verdict.findings if finding.state in WRONG}
    finished = files is not None and files.finished and not wrong & {SUMMARY, MODEL, RANGES, RECIPE}
    resume = f"give the run's training command again: it continues from {whole[-1]}" if whole else ""
    begin = "train again with --fresh, which moves these files aside"
    if lost := wrong & {MANIFEST, SUMMARY, MODEL, RANGES, RECIPE}:
        names = ", ".join(sorted(lost))
        verdict.advice.append(
            f"recoverable: {names}; {resume}"
            if resume
            else f"not recoverable: {names}; no checkpoint is whole. To go on, {begin}"
        )
    if METRICS in wrong:
        rows, manifest = (files.rows, files.manifest) if files else (Rows(), None)
        if manifest and manifest.metrics == rows.head and not rows.problems:
            resume = ""  # training has gone on without them already
        verdict.advice.append(
            f"not recoverable: the lost rows of {METRICS}; the model does not depend on them. "
            + (f"To keep the intact rows, {resume}" if resume else f"To get all rows, {begin}")
        )
    if exports := sorted(name for name in wrong if name.endswith(".optg")):
        verdict.advice.append(f"recoverable: {', '.join(exports)}; export the run again: optg export {verdict.path}")
    if saved := [name for name in wrong if name.startswith(f"{CHECKPOINTS}/")]:
        instead = f"training continues from {whole[-1]}" if whole else f"no checkpoint is whole, so {begin}"
        instead = "the run has finished and does not need it" if finished else instead
        verdict.advice.append(f"not recoverable: {', '.join(sorted(saved))}; {instead}")


def short(error: Exception | str, folder: Path) -> str:
    """Return the message without the path, which the line names already."""
    return re.sub(rf"^{re.escape(str(folder))}/\S+?( is damaged)?: ", "", str(error))
