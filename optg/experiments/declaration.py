"""Build experiments from contents.toml. An experiment is a table of cells (rows × columns, on some datasets) of runs."""

import tomllib
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from optg.experiments.paper_figures import PaperFigure, find_paper_figure, paper_notes
from optg.experiments.planned_run import PlannedRun, plan_run, recipe_plan
from optg.experiments.trained import PREFIX
from optg.methods import METHODS
from optg.naming import nearest


@dataclass
class Cell:
    """One accuracy of a table: the mean over seeds. Each seed may have several runs; the closest to the target counts."""

    dataset: str
    row: str
    column: str
    sparsity: float | None  # the target; None for the dense model
    runs: list[PlannedRun]
    paper: PaperFigure | None

    @property
    def paper_sparsity(self) -> float:
        """Return the sparsity of the paper's figure, in %."""
        return self.paper.sparsity if self.paper and self.paper.sparsity else 100 * (self.sparsity or 0.0)


@dataclass
class Experiment:
    name: str
    title: str
    cells: list[Cell] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    curves: dict[str, Any] | None = None  # parameters of a figure that is drawn without any training
    by_sparsity: bool = False  # whether the columns are sparsities
    plotted: bool = False  # whether it is a plot of accuracy against sparsity

    @property
    def runs(self) -> list[PlannedRun]:
        """Return each run once: column by column, later seeds last, and after the run whose model it starts from."""
        ordered = sorted((run for cell in self.cells for run in cell.runs), key=lambda run: run.plan.recipe.seed)
        unique: dict[str, PlannedRun] = {}
        for run in ordered:
            for needed in (run.starts_from, run):
                if needed is not None:
                    unique.setdefault(needed.key, needed)
        return list(unique.values())


@dataclass
class Selection:
    """The part of an experiment to run, and changes to every run."""

    on: tuple[str, ...] = ()  # datasets
    only: tuple[str, ...] = ()  # rows, by label or method
    columns: tuple[str, ...] = ()
    optional_columns: bool = False  # include columns that only run when selected by name
    sparsity: tuple[float, ...] = ()
    seeds: tuple[int, ...] = ()
    settings: dict[str, Any] = field(default_factory=dict)
    output: Path = Path("runs/reproduce")


@cache
def declarations() -> dict[str, Any]:
    return tomllib.loads((files("optg.experiments") / "contents.toml").read_text())


def experiment_names() -> list[str]:
    return [name for name in declarations() if name != "bases"]


def experiment_datasets(name: str) -> list[str]:
    return list(declarations()[name].get("on", {}))


def load_experiment(name: str, selection: Selection | None = None) -> Experiment:
    """Return an experiment, or the selected part of it."""
    selection = selection or Selection()
    if name not in experiment_names():
        raise ValueError(f"unknown experiment {name!r}; {nearest(name, experiment_names())}")
    declared = declarations()[name]
    refuse_selection(name, declared, selection)
    notes = list(declared.get("notes", ()))
    if "curves" in declared:
        return Experiment(name, declared["title"], notes=notes, curves=declared["curves"])
    datasets = selection.on or tuple(declared.get("default", experiment_datasets(name)[:1]))
    rows = select(name, "row", selection.only, declared_rows(declared))
    columns = select_columns(name, declared, selection)
    for part in [*rows, *columns]:
        for key in part.get("settings", {}).keys() & selection.settings.keys():
            raise ValueError(f"{name} itself sets {key}, in {part['label']!r}; remove --set {key}, or that row or column")
    cells = [
        cell
        for column in columns
        for dataset in datasets
        for row in rows
        if column is columns[0] or not is_dense(row)  # the dense model has one cell for all columns
        if column["label"] in row.get("columns", [column["label"]])
        for cell in build_cell(declared, dataset, row, column, selection)
    ]
    if not cells:
        raise ValueError(f"no run of {name} matches; remove --only, --columns or --sparsity")
    notes += paper_notes(declared, datasets) if any(cell.paper for cell in cells) else []
    by_sparsity, plotted = has_sparsity_columns(declared), declared.get("plotted", False)
    return Experiment(name, declared["title"], cells, notes, by_sparsity=by_sparsity, plotted=plotted)


def refuse_selection(name: str, declared: dict[str, Any], selection: Selection) -> None:
    """Raise if the experiment cannot do what is selected."""
    given = selection.on, selection.only, selection.columns, selection.sparsity, selection.seeds, selection.settings
    if "curves" in declared and any(given):
        raise ValueError(f"{name} is drawn, not trained; remove the options that select or change runs")
    for key, instead in (("sparsity", "--sparsity"), ("seed", "--seeds")):
        if key in selection.settings:
            raise ValueError(f"--set {key}: expected {instead} instead")
    if selection.columns and selection.sparsity:
        raise ValueError("--columns and --sparsity both select columns; expected one of them")
    if len(selection.sparsity) > 1 and not has_sparsity_columns(declared):
        raise ValueError(f"the columns of {name} are not sparsities; expected one --sparsity for all its runs")
    changes_by_column = [changes for row in declared_rows(declared) for changes in row.get("at", {}).values()]
    if "epochs" in selection.settings and any("epochs" in changes.get("settings", {}) for changes in changes_by_column):
        raise ValueError(f"the columns of {name} are numbers of epochs; expected --columns instead of --epochs")
    known = experiment_datasets(name)
    for dataset in selection.on:
        if dataset not in known:
            raise ValueError(f"{name} does not run on {dataset!r}; expected {', '.join(known)}")


def declared_rows(declared: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the rows, each with a method and a label."""
    rows = [{"method": row} if isinstance(row, str) else row for row in declared.get("rows", ())]
    return [{"label": row["method"], **row} for row in rows]


def declared_columns(declared: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the columns, each with a label; a number becomes a sparsity in %."""
    columns = declared.get("columns", [{"label": ""}])
    return [column if isinstance(column, dict) else {"label": f"{column:g}", "sparsity": column} for column in columns]


def has_sparsity_columns(declared: dict[str, Any]) -> bool:
    return all("sparsity" in column for column in declared_columns(declared))


def is_dense(row: dict[str, Any]) -> bool:
    return METHODS[row["method"]].when == "never"


def select_columns(name: str, declared: dict[str, Any], selection: Selection) -> list[dict[str, Any]]:
    if selection.sparsity and has_sparsity_columns(declared):
        return [{"label": f"{100 * s:g}", "sparsity": 100 * s} for s in selection.sparsity]
    columns = declared_columns(declared)
    if selection.columns:
        return select(name, "column", selection.columns, columns)
    return [column for column in columns if selection.optional_columns or not column.get("optional")]


def select(experiment: str, kind: str, wanted: tuple[str, ...], known: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows or columns that are wanted by label or method, or all if none is."""
    for name in wanted:
        if not any(name in (one["label"], one.get("method")) for one in known):
            labels = [one["label"] for one in known if one["label"]]
            raise ValueError(f"{experiment} has no {kind} {name!r}" + (f"; {nearest(name, labels)}" if labels else ""))
    return [one for one in known if not wanted or one["label"] in wanted or one.get("method") in wanted]


def build_cell(
    declared: dict[str, Any], dataset: str, row: dict[str, Any], column: dict[str, Any], selection: Selection
) -> list[Cell]:
    """Return one cell, or none on ImageNet if the paper has no figure to compare a week of training with."""
    dense, label = is_dense(row), column["label"]
    base = declarations()["bases"][declared["on"][dataset]]
    replaces_declared = bool(selection.sparsity) and "sparsity" not in column
    target = (
        100 * selection.sparsity[0] if replaces_declared else column.get("sparsity", declared.get("sparsity", {}).get(dataset))
    )
    figure = find_paper_figure(declared, base, dataset, row, label, 0.0 if dense else target)
    if declared.get("paper") and dataset == "imagenet" and figure is None and not selection.sparsity:
        return []
    settings, options = merge_changes(base, row, column, target)
    unchanged = {**vars(recipe_plan(base["recipe"]).recipe), **settings}
    if (replaces_declared and not dense) or any(
        selection.settings.get(key, unchanged[key]) != unchanged[key] for key in ("model", "data", "epochs")
    ):
        figure = None  # the paper trained something else
    runs = build_runs(base, dataset, row, settings, options, selection)
    return [Cell(dataset, row["label"], "" if dense else label, None if dense else target / 100, runs, figure)]


def merge_changes(
    base: dict[str, Any], row: dict[str, Any], column: dict[str, Any], target: float
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the recipe settings and method options of a cell; later sources override earlier ones."""
    options = dict(row.get("at", {}).get(column["label"], {}))
    settings = options.pop("settings", {})
    settings = {**base.get("settings", {}), **row.get("settings", {}), **column.get("settings", {}), **settings}
    own = base.get("methods", {}).get(row["method"], {})
    options = {**own, **row.get("options", {}), **column.get("options", {}), **options}
    if is_dense(row):
        settings["sparsity"] = 0.0
    elif not METHODS[row["method"]].learns_sparsity:
        settings["sparsity"] = round(target / 100, 6)
    return settings, options


def build_runs(
    base: dict[str, Any], dataset: str, row: dict[str, Any], settings: dict[str, Any], options: dict[str, Any],
    selection: Selection,
) -> list[PlannedRun]:  # fmt: skip
    """Return a run for each seed and alternative of a cell."""
    alternatives = row.get("alternatives", [{}])
    if isinstance(alternatives, dict):
        alternatives = alternatives.get(dataset, [{}])
    runs = []
    for seed in selection.seeds or row.get("seeds", (0,)):
        changed = {**settings, "seed": seed, **selection.settings}
        starts_from = None
        if method := row.get("starts_from"):
            changed_start = {**base.get("settings", {}), "sparsity": 0.0, "seed": seed, **selection.settings}
            starts_from = plan_run(base["recipe"], method, changed_start, {})
            changed["model"] = f"{PREFIX}{selection.output / starts_from.name}"
        for alternative in alternatives:
            runs.append(plan_run(base["recipe"], row["method"], changed, {**options, **alternative}, starts_from))
    return runs
