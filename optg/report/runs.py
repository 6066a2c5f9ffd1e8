"""What there is to show: runs read from their folders, or from summaries that were kept without one.

A folder is one that `optg train` made; a folder of such folders stands for all of them. A `.jsonl` file has one summary.json
a line; a `.json` file is one summary. A run that has not ended is shown as far as it got.
"""

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from optg.methods import METHODS, defaults
from optg.report.markup import is_number, share
from optg.training import recipe
from optg.training.recipe import EXECUTION_SETTINGS, RecipeError

REQUIRED = {"method": str, "settings": dict, "accuracy": float, "sparsity": float}
SETTINGS = {"model": str, "data": str, "sparsity": float, "epochs": int, "seed": int}


@dataclass
class Run:
    """One run, as far as it is known. What was not recorded is None or empty."""

    name: str  # its folder, or the file and line it was read from
    method: str
    settings: dict[str, Any]
    options: dict[str, Any]
    finished: bool
    accuracy: float | None
    sparsity: float | None  # that it reached
    rows: list[dict[str, Any]] = field(default_factory=list)  # one for each epoch
    folder: Path | None = None
    summary: dict[str, Any] = field(default_factory=dict)
    label: str = ""  # short, and unlike that of any other run of its group

    @property
    def where(self) -> tuple[str, str]:
        """The model and the data: runs that differ in these are not compared."""
        return self.settings["model"], self.settings["data"]

    @property
    def target(self) -> float:
        """The sparsity asked for, or the one that a method which finds its own has come to, as exactly as tables have it."""
        learns = self.method in METHODS and METHODS[self.method].learns_sparsity
        return round(self.sparsity, 4) if learns and self.sparsity is not None else self.settings["sparsity"]

    @property
    def epoch(self) -> int:
        return self.rows[-1]["epoch"] if self.rows else 0

    def number(self, key: str) -> float | None:
        """A number of the summary, if it has it."""
        value = self.summary.get(key)
        return value if is_number(value) else None

    def curve(self, key: str) -> list[tuple[float, float]]:
        """A column of the metrics against the epoch, where it was recorded."""
        return [(row["epoch"], row[key]) for row in self.rows if is_number(row.get(key))]


def read_all(paths: Iterable[Path]) -> list[Run]:
    """Every run that the paths stand for, each once: its folder before its line in a file."""
    found: list[Run] = []
    seen: set[Path] = set()
    for path in sorted(paths, key=lambda path: not path.is_dir()):
        for folder in folders_of(path) if path.is_dir() else []:
            if folder.resolve() not in seen:
                seen.add(folder.resolve())
                found.append(read_folder(folder))
        if not path.is_dir():
            found += [run for run in read_file(path) if all(run.summary != other.summary for other in found)]
    if not found:
        raise RecipeError("there is nothing to report; give the folder of a run, or a .jsonl file of summaries")
    return found


def folders_of(path: Path) -> list[Path]:
    """A run's folder itself, or all runs in a folder and in those directly in it, such as runs/reproduce."""
    if (path / "recipe.toml").is_file():
        return [path]
    inside = sorted(p.parent for depth in ("*", "*/*") for p in path.glob(f"{depth}/recipe.toml"))
    if not inside:
        raise RecipeError(f"{path} is not the folder of a run, and has none in it: there is no recipe.toml")
    return inside


def read_folder(path: Path) -> Run:
    rows = read_metrics(path / "metrics.jsonl")
    name, ended = path.resolve().name, path / "summary.json"
    if ended.is_file():
        run = from_summary(parse(ended.read_bytes(), str(ended)), str(ended), name)
        run.rows, run.folder = rows, path
        return run
    try:
        plan = recipe.load(str(path / "recipe.toml"))
    except UnicodeDecodeError as error:
        raise RecipeError(f"{path / 'recipe.toml'} is damaged: {error}") from None
    last = rows[-1] if rows else {}
    settings, options = as_json(asdict(plan.recipe)), as_json(asdict(recipe.build_method(plan, str(path / "recipe.toml"))))
    return Run(
        name, plan.method, settings, options, False, last.get("accuracy"), last.get("sparsity"), rows, path,
        {"seconds": sum(row["seconds"] for row in rows if is_number(row.get("seconds")))},
    )  # fmt: skip


def as_json(values: dict[str, Any]) -> dict[str, Any]:
    """As a summary.json has them, so that runs that ended and runs that did not can be compared."""
    return json.loads(json.dumps(values))


def read_file(path: Path) -> list[Run]:
    """Summaries: one in a .json file, one a line in a .jsonl file."""
    if not path.exists():
        raise RecipeError(f"there is no {path}; give the folder of a run, or a .jsonl file of summaries")
    if path.suffix == ".json":
        return [from_summary(parse(path.read_bytes(), str(path)), str(path), path.stem)]
    if path.suffix != ".jsonl":
        raise RecipeError(f"{path} is neither the folder of a run nor a .json or .jsonl file of summaries")
    lines = enumerate(path.read_bytes().splitlines(), 1)
    return [
        from_summary(parse(line, f"{path}, line {i}"), f"{path}, line {i}", f"{path.stem}:{i}")
        for i, line in lines
        if line.strip()
    ]


def from_summary(known: Any, where: str, name: str) -> Run:
    require(known, REQUIRED, where)
    require(known["settings"], SETTINGS, f"{where}: settings")
    options = known.get("options")
    return Run(
        name, known["method"], known["settings"], options if isinstance(options, dict) else {}, True, known["accuracy"],
        known["sparsity"], summary=known,
    )  # fmt: skip


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """One row for each epoch. A last line that was cut off, by a kill while it was written, is passed over."""
    if not path.is_file():
        return []
    lines = path.read_bytes().splitlines(keepends=True)
    if lines and not lines[-1].endswith(b"\n"):
        lines.pop()
    rows = []
    for i, line in enumerate(lines, 1):
        row = parse(line, f"{path}, line {i}")
        require(row, {"epoch": int}, f"{path}, line {i}")
        rows.append(row)
    return rows


def parse(data: bytes, where: str) -> Any:
    try:
        return json.loads(data)
    except ValueError as error:
        raise RecipeError(f"{where} is damaged: {error}") from None


def require(values: Any, kinds: dict[str, type], where: str) -> None:
    """Refuse what is not a table with these keys."""
    if not isinstance(values, dict):
        raise RecipeError(f"{where} holds a {type(values).__name__}; expected a table of names and values")
    for key, kind in kinds.items():
        value = values.get(key)
        fits = isinstance(value, (int, float) if kind is float else kind) and not isinstance(value, bool)
        if not fits:
            found = "is missing" if key not in values else f"is {value!r}"
            raise RecipeError(f"{where}: {key!r} {found}; expected a {kind.__name__}, as optg train writes it")


def group(runs: Iterable[Run]) -> dict[tuple[str, str], list[Run]]:
    """Runs of one model on one dataset together, in the order they came; within a group by method and sparsity."""
    groups: dict[tuple[str, str], list[Run]] = {}
    for run in runs:
        groups.setdefault(run.where, []).append(run)
    for members in groups.values():
        members.sort(key=lambda run: (run.method != "dense", run.method, run.target, run.settings["seed"]))
        name_apart(members)
    return groups


def name_apart(runs: list[Run]) -> None:
    """Label runs by method and sparsity, and by what is not usual: in a recipe among all of them, in options among runs of
    the method, in the seed among those that would have the same label."""
    for run in runs:
        run.label = run.method if run.method == "dense" else f"{run.method} {share(run.target)}"

    def among(run: Run, key: str) -> tuple[str, str]:
        return key, run.label if key == "seed" else "" if key in run.settings else run.method

    known = [{among(run, key): value for key, value in all_settings(run).items() if key != "sparsity"} for run in runs]
    values: dict[tuple[str, str], list[Any]] = {}
    for settings in known:
        for place, value in settings.items():
            values.setdefault(place, []).append(value)
    usual = {place: most(found) for place, found in values.items()}
    for run, settings in zip(runs, known):
        parts = [said(place[0], value) for place, value in settings.items() if repr(value) != usual[place]]
        run.label = ", ".join([run.label, *(parts if len(parts) <= 4 else [run.name])])
    for same in by_label(runs):
        for run in same:
            run.label += f", {run.name}"
    for same in by_label(runs):
        for i, run in enumerate(same, 1):
            run.label += f" ({i})"


def by_label(runs: list[Run]) -> list[list[Run]]:
    """Runs that cannot be told apart yet."""
    labels = [run.label for run in runs]
    return [[run for run in runs if run.label == label] for label, count in Counter(labels).items() if count > 1]


def most(values: Iterable[Any]) -> str | None:
    """What more than half of the runs have, which need not be said of them."""
    written = [repr(value) for value in values]
    value, count = Counter(written).most_common(1)[0]
    return value if 2 * count > len(written) else None


def all_settings(run: Run) -> dict[str, Any]:
    """What makes a run what it is: its recipe, but for how it was computed, and its method's options, of which an older run
    may not know all: it had the defaults."""
    recipe = {key: value for key, value in run.settings.items() if key not in EXECUTION_SETTINGS}
    options = defaults(run.method) | run.options
    if run.options.get("seed", recipe["seed"]) == recipe["seed"]:  # the method's is the run's
        options.pop("seed", None)
    return recipe | {f"{run.method} {key}" if key in recipe else key: value for key, value in options.items()}


def said(key: str, value: Any) -> str:
    name = key.replace("_", " ")
    if isinstance(value, bool):
        return name if value else f"no {name}"
    return f"{name}\N{NO-BREAK SPACE}{value:g}" if isinstance(value, float) else f"{name}\N{NO-BREAK SPACE}{value}"
