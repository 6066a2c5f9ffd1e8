"""Runs, read from their folders or from files of summaries.

A run's folder is one that `optg train` wrote; a folder of such folders stands for all of them. A `.jsonl` file has one
summary.json per line; a `.json` file is one summary. An unfinished run is read up to its last epoch;
it has no result. Everything that the run's manifest lists is checked.
"""

import json
import warnings
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from optg.files import load_json
from optg.methods import METHODS, current_options, defaults
from optg.report.markup import is_number, sparsity_label
from optg.training import recipe
from optg.training.errors import DamagedFile
from optg.training.manifest import MANIFEST, MODEL, RECIPE, SUMMARY
from optg.training.metrics import METRICS
from optg.training.recipe import EXECUTION_SETTINGS, RecipeError
from optg.training.run_files import RunFiles

REQUIRED = {"method": str, "settings": dict, "accuracy": float, "sparsity": float}
SETTINGS = {"model": str, "data": str, "sparsity": float, "epochs": int, "seed": int}


@dataclass
class RunRecord:
    """What the files of one run say. Values that were not recorded are None or empty."""

    name: str  # the folder's name, or the file and line it was read from
    method: str
    settings: dict[str, Any]
    options: dict[str, Any]
    finished: bool
    accuracy: float | None
    sparsity: float | None  # reached
    rows: list[dict[str, Any]] = field(default_factory=list)  # one per epoch
    files: RunFiles | None = None  # the folder's files; None for a run read from a summary
    summary: dict[str, Any] = field(default_factory=dict)
    label: str = ""  # short, and unique within its group

    @property
    def task(self) -> tuple[str, str]:
        """Model and dataset. Only runs of the same task are compared."""
        return self.settings["model"], self.settings["data"]

    @property
    def target(self) -> float:
        """The requested sparsity, or the sparsity reached (to 0.01 %) if the method learns it."""
        learns = self.method in METHODS and METHODS[self.method].learns_sparsity
        return round(self.sparsity, 4) if learns and is_number(self.sparsity) else self.settings["sparsity"]

    @property
    def epoch(self) -> int:
        return self.rows[-1]["epoch"] if self.rows else 0

    def number(self, key: str) -> float | None:
        """Return a number of the summary, or None."""
        value = self.summary.get(key)
        return value if is_number(value) else None

    def curve(self, key: str) -> list[tuple[float, float]]:
        """Return a column of the metrics as (epoch, value) pairs, for the epochs that recorded it."""
        return [(row["epoch"], row[key]) for row in self.rows if is_number(row.get(key)) and is_number(row["epoch"])]


def read_runs(paths: Iterable[Path], damaged: list[RecipeError | DamagedFile] | None = None) -> list[RunRecord]:
    """Return every run that the paths stand for, each once. Folders come first, as they know more than summaries.

    A damaged run in a folder of runs is left out, if others are intact and there is a list for the errors.
    """
    found: list[RunRecord] = []
    errors: list[RecipeError | DamagedFile] = []
    seen: set[Path] = set()
    for path in sorted(paths, key=lambda path: not path.is_dir()):
        for folder in find_run_folders(path) if path.is_dir() else []:
            if folder.resolve() not in seen:
                seen.add(folder.resolve())
                try:
                    found.append(read_folder(folder))
                except (RecipeError, DamagedFile) as error:
                    if folder == path or damaged is None:
                        raise
                    errors.append(error)
        if not path.is_dir():
            found += [run for run in read_summaries(path) if all(run.summary != other.summary for other in found)]
    if old := sum(run.files is not None and run.files.is_old for run in found):
        warnings.warn(
            f"{old} of {len(found)} runs have no {MANIFEST}: an older version wrote them, so they cannot be checked",
            stacklevel=2,
        )
    if not found and errors:
        raise errors[0]
    if damaged is not None:
        damaged += errors
    if not found:
        raise RecipeError("nothing to report; give the folder of a run, or a .jsonl file of summaries")
    return found


def find_run_folders(path: Path) -> list[Path]:
    """Return a run's own folder, or all run folders up to two levels below, such as those in runs/reproduce."""
    if (path / "recipe.toml").is_file():
        return [path]
    inside = sorted(p.parent for depth in ("*", "*/*") for p in path.glob(f"{depth}/recipe.toml"))
    if not inside:
        raise RecipeError(
            f"{path} is not the folder of a run and contains none (no recipe.toml found); give a folder that optg train wrote"
        )
    return inside


def read_folder(path: Path) -> RunRecord:
    files = RunFiles(path)
    rows, name = files.intact_rows(), path.resolve().name
    for i, row in enumerate(rows, 1):
        require(row, {"epoch": int}, f"{path / METRICS}, line {i}")
    content = files.read(RECIPE)
    if files.has(MODEL):
        files.check(MODEL)
    if files.has(SUMMARY):
        run = from_summary(files.summary(), str(path / SUMMARY), name)
        run.rows, run.files = rows, files
        return run
    plan = recipe.read_file(path / RECIPE, content)
    settings, options = as_json(asdict(plan.recipe)), as_json(asdict(recipe.build_method(plan, str(path / RECIPE))))
    return RunRecord(
        name, plan.method, settings, options, False, None, rows[-1].get("sparsity") if rows else None, rows, files,
        {"seconds": sum(row["seconds"] for row in rows if is_number(row.get("seconds")))},
    )  # fmt: skip


def as_json(values: dict[str, Any]) -> dict[str, Any]:
    """Return values in the types of JSON, so that finished and unfinished runs can be compared."""
    return json.loads(json.dumps(values))


def read_summaries(path: Path) -> list[RunRecord]:
    """Read the summary in a .json file, or the summaries in a .jsonl file, one per line."""
    if not path.exists():
        raise RecipeError(f"{path} does not exist; give the folder of a run, or a .jsonl file of summaries")
    if path.suffix == ".json":
        return [from_summary(parse_json(path.read_bytes(), str(path)), str(path), path.stem)]
    if path.suffix != ".jsonl":
        raise RecipeError(f"{path} is neither the folder of a run nor a .json or .jsonl file of summaries")
    lines = enumerate(path.read_bytes().splitlines(), 1)
    return [
        from_summary(parse_json(line, f"{path}, line {i}"), f"{path}, line {i}", f"{path.stem}:{i}")
        for i, line in lines
        if line.strip()
    ]


def from_summary(known: Any, where: str, name: str) -> RunRecord:
    require(known, REQUIRED, where)
    require(known["settings"], SETTINGS, f"{where}: settings")
    options = known.get("options")
    options = current_options(known["method"], options) if isinstance(options, dict) else {}
    return RunRecord(
        name, known["method"], known["settings"], options, True, known["accuracy"], known["sparsity"], summary=known
    )  # fmt: skip


def parse_json(data: str | bytes, where: str) -> Any:
    """Parse JSON from a file."""
    try:
        return load_json(data)
    except (ValueError, RecursionError) as error:
        raise RecipeError(f"{where} is damaged: {error}") from None


def require(values: Any, kinds: dict[str, type], where: str) -> None:
    """Refuse anything but a table that has these keys with values of these types."""
    if not isinstance(values, dict):
        raise RecipeError(f"{where} holds a {type(values).__name__}; expected a table of names and values")
    for key, kind in kinds.items():
        value = values.get(key)
        fits = isinstance(value, (int, float) if kind is float else kind) and not isinstance(value, bool)
        if not fits:
            found = "is missing" if key not in values else f"is {value!r}"
            raise RecipeError(f"{where}: {key!r} {found}; expected a {kind.__name__}, as optg train writes it")


def group_runs(runs: Iterable[RunRecord]) -> dict[tuple[str, str], list[RunRecord]]:
    """Return the runs by model and dataset, sorted by method and sparsity, with a unique label each."""
    groups: dict[tuple[str, str], list[RunRecord]] = {}
    for run in runs:
        groups.setdefault(run.task, []).append(run)
    for members in groups.values():
        members.sort(key=lambda run: (run.method != "dense", run.method, run.target, run.settings["seed"]))
        label_runs(members)
    return groups


def label_runs(runs: list[RunRecord]) -> None:
    """Label each run by method and sparsity, and by every setting in which it differs from most of the others.

    Recipe settings are compared among all runs, method options among runs of the method, and seeds among runs that would
    otherwise have the same label.
    """
    for run in runs:
        run.label = run.method if run.method == "dense" else f"{run.method} {sparsity_label(run.target)}"

    def compared_among(run: RunRecord, key: str) -> tuple[str, str]:
        return key, run.label if key == "seed" else "" if key in run.settings else run.method

    known = [{compared_among(run, key): value for key, value in all_settings(run).items() if key != "sparsity"} for run in runs]
    values: dict[tuple[str, str], list[Any]] = {}
    for settings in known:
        for place, value in settings.items():
            values.setdefault(place, []).append(value)
    usual = {place: majority(found) for place, found in values.items()}
    for run, settings in zip(runs, known):
        parts = [describe_setting(place[0], value) for place, value in settings.items() if repr(value) != usual[place]]
        run.label = ", ".join([run.label, *(parts if len(parts) <= 4 else [run.name])])
    for same in clashes(runs):
        for run in same:
            run.label += f", {run.name}"
    for same in clashes(runs):
        for i, run in enumerate(same, 1):
            run.label += f" ({i})"


def clashes(runs: list[RunRecord]) -> list[list[RunRecord]]:
    """Return the runs that share a label, one list per label."""
    labels = [run.label for run in runs]
    return [[run for run in runs if run.label == label] for label, count in Counter(labels).items() if count > 1]


def majority(values: Iterable[Any]) -> str | None:
    """Return the repr of the value that more than half of the runs have, or None."""
    written = [repr(value) for value in values]
    value, count = Counter(written).most_common(1)[0]
    return value if 2 * count > len(written) else None


def all_settings(run: RunRecord) -> dict[str, Any]:
    """Return the settings that decide a run's result: its recipe without execution settings, and its method's options.

    Options that an older run did not record have their defaults.
    """
    recipe = {key: value for key, value in run.settings.items() if key not in EXECUTION_SETTINGS}
    options = defaults(run.method) | run.options
    if run.options.get("seed", recipe["seed"]) == recipe["seed"]:  # the method uses the seed of the run
        options.pop("seed", None)
    return recipe | {f"{run.method} {key}" if key in recipe else key: value for key, value in options.items()}


def describe_setting(key: str, value: Any) -> str:
    name = key.replace("_", " ")
    if isinstance(value, bool):
        return name if value else f"no {name}"
    if isinstance(value, dict):
        value = ", ".join(f"{option}={chosen}" for option, chosen in value.items())
    return f"{name}\N{NO-BREAK SPACE}{value:g}" if isinstance(value, float) else f"{name}\N{NO-BREAK SPACE}{value}"
