"""contents.toml read: an experiment is rows × columns on one or more places, and each of its cells is one or more runs."""

import copy
import dataclasses
import hashlib
import re
import tomllib
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, get_type_hints

from optg.core.schedules import default_alpha
from optg.experiments.trained import PREFIX
from optg.methods import METHODS, defaults
from optg.naming import nearest
from optg.report.paper import tables
from optg.training import recipe as recipes
from optg.training.recipe import EXECUTION_SETTINGS, Plan, Recipe, build_method, check, converted, flag

IMAGES = {"cifar10": 50_000, "cifar100": 50_000}  # to train on
NEAR = 0.01  # a paper's sparsity so near to the wanted one is named beside it; others are another experiment


@dataclass
class Run:
    """One call of `optg train`."""

    recipe: str
    plan: Plan
    needs: "Run | None" = None  # the run whose trained model this one starts from

    @property
    def options(self) -> dict[str, Any]:
        """All options of the method."""
        return dataclasses.asdict(build_method(self.plan))

    @property
    def changes(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Settings and options that are not the recipe's own; sparsity and seed stand for themselves."""
        usual = own_plan(self.recipe)
        seeded = dataclasses.replace(usual.recipe, seed=self.plan.recipe.seed)
        own = Run(self.recipe, dataclasses.replace(usual, recipe=seeded, method=self.plan.method))
        before, now = dataclasses.asdict(own.plan.recipe), dataclasses.asdict(self.plan.recipe)
        settings = {k: v for k, v in now.items() if v != before[k] and k not in ("sparsity", "seed")}
        return settings, {k: v for k, v in self.options.items() if v != own.options[k]}

    @property
    def name(self) -> str:
        """Of its folder: what makes the run what it is."""
        settings, options = self.changes
        settings.pop("folder", None)
        if str(settings.get("model", "")).startswith(PREFIX):
            settings["model"] = "trained"
        parts = [f"{k}={v}" for k, v in {**settings, **options}.items()]
        plan = self.plan.recipe
        text = "-".join([self.recipe, self.plan.method, f"{plan.sparsity:g}", *parts, f"seed{plan.seed}"])
        safe = re.sub(r"[^\w.=-]+", "_", text, flags=re.ASCII)
        return safe if len(safe) < 200 else f"{safe[:180]}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"

    @property
    def arguments(self) -> list[str]:
        """What `optg` is called with, but for the folder of the run."""
        settings, options = self.changes
        plan = self.plan.recipe
        out = ["train", "--recipe", self.recipe, "--method", self.plan.method]
        out += ["--sparsity", f"{plan.sparsity!r}", "--seed", f"{plan.seed}"]
        for prefix, values in (("", settings), ("method.", options)):
            for key, value in values.items():
                out += flag(prefix, key, value)
        return out

    @property
    def key(self) -> str:
        """The same for two runs that train the same thing."""
        return key_of({"settings": dataclasses.asdict(self.plan.recipe), "method": self.plan.method, "options": self.options})


def key_of(summary: dict[str, Any]) -> str:
    """What makes a run what it is, from its summary. What an older one does not know had its default."""
    method = METHODS.get(summary["method"])
    settings = dataclasses.asdict(Recipe()) | summary["settings"]
    options = defaults(summary["method"]) | summary["options"]
    settings = {k: v for k, v in settings.items() if k not in EXECUTION_SETTINGS}
    settings["model"] = re.sub(f"{re.escape(PREFIX)}.*/", PREFIX, settings["model"])  # whatever folder that run is in
    settings["milestones"] = list(settings["milestones"])  # JSON has no tuples
    if "alpha" in options and options["alpha"] is None:
        options["alpha"] = default_alpha(settings["epochs"])
    if method and method.learns_sparsity:
        settings["sparsity"] = None
    return repr([summary["method"], sorted(settings.items()), sorted(options.items())])


@dataclass(frozen=True)
class Figure:
    """One of the paper's."""

    accuracy: float  # in %
    sparsity: float | None = None  # in %, where it is not the one asked for
    flops: float | None = None


@dataclass
class Cell:
    """One figure of a table: the mean over seeds of the runs that are nearest to the wanted sparsity."""

    place: str
    row: str
    column: str
    sparsity: float | None  # the wanted one; None: whatever it is
    runs: list[Run]
    paper: Figure | None

    @property
    def paper_sparsity(self) -> float:
        """In %, where the paper has a figure."""
        return self.paper.sparsity if self.paper and self.paper.sparsity else 100 * (self.sparsity or 0.0)


@dataclass
class Experiment:
    name: str
    title: str
    cells: list[Cell] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    curves: dict[str, Any] | None = None  # of an experiment that is drawn, not trained

    @property
    def runs(self) -> list[Run]:
        """Each once: in the order of the table's columns, further seeds at the end, and first what others start from."""
        ordered = sorted((run for cell in self.cells for run in cell.runs), key=lambda run: run.plan.recipe.seed)
        found: dict[str, Run] = {}
        for run in ordered:
            for needed in (run.needs, run):
                if needed is not None:
                    found.setdefault(needed.key, needed)
        return list(found.values())


@dataclass
class Choice:
    """What a user wants of an experiment."""

    on: tuple[str, ...] = ()
    only: tuple[str, ...] = ()  # rows, by label or method
    columns: tuple[str, ...] = ()
    asked: bool = False  # columns too that run only when asked for
    sparsity: tuple[float, ...] = ()
    seeds: tuple[int, ...] = ()
    settings: dict[str, Any] = field(default_factory=dict)
    output: Path = Path("runs/reproduce")


@cache
def own_plan(recipe: str) -> Plan:
    """A recipe as it comes; not to be changed."""
    return recipes.load(recipe)


@cache
def contents() -> dict[str, Any]:
    return tomllib.loads((files("optg.experiments") / "contents.toml").read_text())


def names() -> list[str]:
    return [name for name in contents() if name != "bases"]


def load(name: str, choice: Choice | None = None) -> Experiment:
    """An experiment, or the part of it that is chosen."""
    choice = choice or Choice()
    if name not in names():
        raise ValueError(f"unknown experiment {name!r}; {nearest(name, names())}")
    said = contents()[name]
    refuse(name, said, choice)
    made = Experiment(name, said["title"], notes=list(said.get("notes", ())), curves=said.get("curves"))
    if made.curves:
        return made
    places = list(said["on"])
    for place in choice.on:
        if place not in places:
            raise ValueError(f"{name} does not run on {place!r}; expected {', '.join(places)}")
    chosen_places = choice.on or tuple(said.get("default", places[:1]))
    rows = pick(name, "row", choice.only, [as_row(row) for row in said["rows"]])
    columns = chosen_columns(name, said, choice)
    for part in [*rows, *columns]:
        for key in part.get("settings", {}).keys() & choice.settings.keys():
            raise ValueError(f"{name} itself sets {key}, in {part['label']!r}; expected --set of something else")
    for column in columns:
        for place in chosen_places:
            for row in rows:
                if column is columns[0] or METHODS[row["method"]].when != "never":  # the dense model stands in no column
                    made.cells += cell_of(said, place, row, column, choice)
    if not made.cells:
        raise ValueError(f"{name} has no run of that kind; leave out --only, --columns or --sparsity to see all")
    made.notes += paper_notes(said, chosen_places) if any(cell.paper for cell in made.cells) else []
    return made


def refuse(name: str, said: dict[str, Any], choice: Choice) -> None:
    """What an experiment cannot do, rather than do something else."""
    given = choice.on, choice.only, choice.columns, choice.sparsity, choice.seeds, choice.settings
    if "curves" in said and any(given):
        raise ValueError(f"{name} is drawn, not trained; it takes none of the options that choose runs or change them")
    for key, instead in (("sparsity", "--sparsity"), ("seed", "--seeds")):
        if key in choice.settings:
            raise ValueError(f"--set {key}: expected {instead}, which the tables know of")
    if choice.columns and choice.sparsity:
        raise ValueError("--columns and --sparsity each say which columns; expected one of them")
    if len(choice.sparsity) > 1 and not all("sparsity" in column for column in as_columns(said)):
        raise ValueError(f"the columns of {name} are not sparsities; expected one --sparsity, that of all its runs")
    places = [at for row in map(as_row, said.get("rows", ())) for at in row.get("at", {}).values()]
    if "epochs" in choice.settings and any("epochs" in at.get("settings", {}) for at in places):
        raise ValueError(f"the columns of {name} are its epochs; expected --columns instead of --epochs")


def as_row(row: str | dict[str, Any]) -> dict[str, Any]:
    row = {"method": row} if isinstance(row, str) else row
    return {"label": row["method"], **row}


def as_columns(said: dict[str, Any]) -> list[dict[str, Any]]:
    """A number is a sparsity in %."""
    columns = said.get("columns", [{"label": ""}])
    return [column if isinstance(column, dict) else {"label": f"{column:g}", "sparsity": column} for column in columns]


def chosen_columns(name: str, said: dict[str, Any], choice: Choice) -> list[dict[str, Any]]:
    columns = as_columns(said)
    if choice.columns:
        return pick(name, "column", choice.columns, columns)
    if choice.sparsity and all("sparsity" in column for column in columns):
        return [{"label": f"{100 * s:g}", "sparsity": 100 * s} for s in choice.sparsity]
    return [column for column in columns if choice.asked or not column.get("asked")]


def pick(experiment: str, what: str, wanted: tuple[str, ...], known: list[dict[str, Any]]) -> list[dict[str, Any]]:
    for name in wanted:
        if not any(name in (one["label"], one.get("method")) for one in known):
            labels = [one["label"] for one in known if one["label"]]
            raise ValueError(f"{experiment} has no {what} {name!r}" + (f"; {nearest(name, labels)}" if labels else ""))
    return [one for one in known if not wanted or one["label"] in wanted or one.get("method") in wanted]


def cell_of(said: dict[str, Any], place: str, row: dict[str, Any], column: dict[str, Any], choice: Choice) -> list[Cell]:
    """One cell, or none where the paper has none and it would cost a week."""
    method, label = row["method"], column["label"]
    never = METHODS[method].when == "never"
    wanted = column.get("sparsity", said.get("sparsity", {}).get(place))
    if "sparsity" not in column and choice.sparsity:
        wanted = 100 * choice.sparsity[0]
    base = contents()["bases"][said["on"][place]]
    there = dict(row.get("at", {}).get(label, {}))
    settings = {
        **base.get("settings", {}),
        **row.get("settings", {}),
        **column.get("settings", {}),
        **there.pop("settings", {}),
    }
    options = {**base.get("methods", {}).get(method, {}), **row.get("options", {}), **column.get("options", {}), **there}
    if never:
        settings["sparsity"] = 0.0
    elif not METHODS[method].learns_sparsity:
        settings["sparsity"] = round(wanted / 100, 6)
    runs = []
    for seed in choice.seeds or row.get("seeds", (0,)):
        given = {**settings, "seed": seed, **choice.settings}
        needs = None
        if source := row.get("starts_from"):
            before = {**base.get("settings", {}), "sparsity": 0.0, "seed": seed, **choice.settings}
            needs = make_run(base["recipe"], source, before, {})
            given["model"] = f"{PREFIX}{choice.output / needs.name}"
        tries = row.get("any", [{}])
        for tried in tries.get(place, [{}]) if isinstance(tries, dict) else tries:
            runs.append(make_run(base["recipe"], method, given, {**options, **tried}, needs))
    figure = paper_figure(said, base, place, row, label, 0.0 if never else wanted)
    if said.get("paper") and place == "imagenet" and figure is None and not choice.sparsity:
        return []
    usual = {**vars(own_plan(base["recipe"]).recipe), **settings}
    other = [key for key in ("model", "data", "epochs") if choice.settings.get(key, usual[key]) != usual[key]]
    if other or (choice.sparsity and "sparsity" not in column and not never):
        figure = None  # of something else
    return [Cell(place, row["label"], "" if never else label, None if never else wanted / 100, runs, figure)]


def make_run(recipe: str, method: str, settings: dict[str, Any], options: dict[str, Any], needs: Run | None = None) -> Run:
    plan, hints = copy.deepcopy(own_plan(recipe)), get_type_hints(Recipe)
    for key, value in settings.items():
        if key not in hints:
            raise ValueError(f"unknown setting {key!r}; {nearest(key, hints)}")
        value = list(value) if isinstance(value, tuple) else value
        setattr(plan.recipe, key, converted(key, value, hints[key]))
    plan.method = method
    options = {key: in_steps(value, plan.recipe) for key, value in options.items()}
    plan.methods = {method: {**plan.methods.get(method, {}), **options}}
    if plan.recipe.epochs == 1 and getattr(build_method(plan), "every", 1) is None:
        plan.methods[method]["every"] = 1  # one epoch has no second to cut at
    check(plan.recipe, f"{recipe}, {method}")
    return Run(recipe, plan, needs)


def in_steps(value: Any, recipe: Recipe) -> Any:
    """ "20 epochs" as a number of steps; anything else as it is."""
    match = re.fullmatch(r"(\d+) epochs", value) if isinstance(value, str) else None
    if match is None:
        return value
    synthetic = re.fullmatch(r"synthetic:.*:(\d+)", recipe.data)
    images = int(synthetic[1]) if synthetic else IMAGES.get(recipe.data)
    if images is None:
        raise ValueError(
            f"how many steps {value} are is not known for {recipe.data}; expected {', '.join(IMAGES)} or synthetic:…"
        )
    return int(match[1]) * (images // recipe.batch_size)


def paper_figure(
    said: dict[str, Any], base: dict[str, Any], place: str, row: dict[str, Any], label: str, sparsity: float
) -> Figure | None:
    """The paper's figure for a cell: the row's own, or the nearest point of the table that the experiment names."""
    own = row.get("paper", {}).get(place)
    if isinstance(own, dict):
        own = own.get(label)
    if own is not None:
        return Figure(own)
    recipe, changed = own_plan(base["recipe"]).recipe, base.get("settings", {})
    wanted = (said.get("paper"), changed.get("model", recipe.model), changed.get("data", recipe.data))
    table = next((t for t in tables() if (t.name, t.model, t.data) == wanted), None)
    points = [p for p in table.points if p.method == row["method"]] if table else []
    point = min(points, key=lambda p: abs(p.sparsity - sparsity / 100), default=None)
    if point is None or abs(point.sparsity - sparsity / 100) > NEAR:
        return None
    other = None if abs(point.sparsity - sparsity / 100) < 1e-9 else 100 * point.sparsity
    return Figure(100 * point.accuracy, other, point.flops)


def paper_notes(said: dict[str, Any], places: tuple[str, ...]) -> list[str]:
    """Where the table that the experiment names contradicts itself."""
    return [note for t in tables() if t.name == said.get("paper") and t.data in places for note in t.notes]
