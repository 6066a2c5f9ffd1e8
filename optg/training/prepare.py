"""Look at a run folder before training: has the run finished, is it another run, and what has to be set aside?"""

from collections.abc import Callable
from math import isfinite
from pathlib import Path
from typing import Any

from optg.files import Fingerprint, exists, read_bytes, set_aside
from optg.training import recipe
from optg.training.checkpoint import list_checkpoints
from optg.training.errors import DamagedFile
from optg.training.folder import RunFolder
from optg.training.manifest import MANIFEST, MODEL, RANGES, RECIPE, SUMMARY, Manifest
from optg.training.recipe import Plan, RecipeError
from optg.training.run_files import RunFiles

NEEDED = {"accuracy", "sparsity", "flops", "dense_flops"}  # what the last line of `optg train` prints


def finished_summary(plan: Plan, folder: RunFolder) -> dict[str, Any] | None:
    """Return the summary of a finished run, None if it has to be trained. A finished run's files are never rewritten.

    Raise an error if the folder holds another run. A damaged file means that the run has to be finished again.
    """
    refuse_other_plan(plan, folder)
    try:
        files = RunFiles(folder.path)
        if not exists(folder.path / RECIPE) or not files.finished:
            return None
        files.check(RECIPE)
        files.check(MODEL)
        if plan.recipe.quantize:
            files.check(RANGES)
        summary = files.summary()
        if not files.is_old:
            files.intact_rows()
    except DamagedFile:
        return None
    if not isinstance(summary, dict) or not all(is_finite(summary.get(key)) for key in NEEDED):
        return None
    files.warn_if_old()
    return summary


def is_finite(value: Any) -> bool:
    return isinstance(value, (int, float)) and isfinite(value)


def begin(plan: Plan, folder: RunFolder, say: Callable[[str], None]) -> None:
    """Make the folder ready for training, after the newest checkpoint was read: set damaged files aside, list the recipe.

    The manifest then lists nothing else, so the run counts as unfinished.
    """
    for path in damaged_files(folder.path):
        say(f"{path} is damaged; it was renamed to {set_aside(path).name} and will be written again")
    path, text = folder.path / RECIPE, recipe.dump(plan)
    before, now = Manifest.read(folder.path), Manifest({RECIPE: Fingerprint.of(text.encode())})
    if before is None or not exists(path) or read_bytes(path) != text.encode():
        Manifest().write(folder.path)  # claims nothing while files change
        folder.metrics.upgrade()
        folder.write(RECIPE, text)
    if before != now:
        now.write(folder.path)


def refuse_other_plan(plan: Plan, folder: RunFolder) -> None:
    """Raise an error if the folder holds results of another recipe. Only the data's folder may differ."""
    if not has_results(folder):
        return
    path, text = folder.path / RECIPE, recipe.dump(plan).encode()
    try:
        manifest = Manifest.read(folder.path) or Manifest()
    except DamagedFile:
        manifest = Manifest()
    found = read_bytes(path) if exists(path) else None
    listed = manifest.files.get(RECIPE)
    if Fingerprint.of(text) == listed:
        return  # even if recipe.toml is damaged
    if found is None or (listed and Fingerprint.of(found) != listed):
        state = "damaged" if found is not None else "missing"
        raise RecipeError(
            f"{path} is {state}, so the settings of this command cannot be compared with the run's; give the command that "
            "started the run, another --output, or --fresh to move the run aside"
        )
    before, now = (
        {line for line in content.decode(errors="replace").splitlines() if not line.startswith("folder = ")}
        for content in (found, text)
    )
    if before != now:
        there, here = (", ".join(line for line in sorted(lines) if line) or "–" for lines in (before - now, now - before))
        raise RecipeError(
            f"{folder.path} holds a run with other settings (the run: {there}; this command: {here}); give another --output, "
            "or --fresh to move the run aside"
        )


def has_results(folder: RunFolder) -> bool:
    """Return whether anything was trained in the folder."""
    files = (folder.path / SUMMARY, folder.path / MODEL)
    return bool(list_checkpoints(folder.checkpoints)) or not folder.metrics.is_empty or any(map(exists, files))


def damaged_files(path: Path) -> list[Path]:
    """Return the damaged files of a run folder, except checkpoints and metrics."""
    try:
        files = RunFiles(path)
    except DamagedFile:
        return [path / MANIFEST] if exists(path / MANIFEST) else []
    damaged = []
    for name in (RECIPE, SUMMARY, MODEL, RANGES):
        try:
            if files.has(name):
                files.summary() if name == SUMMARY else files.check(name)
        except DamagedFile:
            damaged.append(path / name)
    return damaged
