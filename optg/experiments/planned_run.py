"""A planned run: one `optg train` command of an experiment, and the key that tells whether two runs train the same thing."""

import copy
import dataclasses
import re
from dataclasses import dataclass
from functools import cache
from typing import Any, get_type_hints

from optg.core.clock import Clock
from optg.core.schedules import default_alpha
from optg.experiments.trained import PREFIX
from optg.methods import METHODS, current_options, defaults
from optg.methods.base import epochs_between_cuts
from optg.naming import nearest
from optg.training import recipe as recipes
from optg.training.recipe import EXECUTION_SETTINGS, Plan, Recipe, build_method, check, converted, flag
from optg.training.run_name import as_assignments, file_name

CIFAR = ("cifar10", "cifar100")  # 50,000 training images


@dataclass
class PlannedRun:
    """One call of `optg train`."""

    recipe: str
    plan: Plan
    starts_from: "PlannedRun | None" = None  # the run whose trained model this one starts from

    @property
    def options(self) -> dict[str, Any]:
        """Return all options of the method."""
        return dataclasses.asdict(build_method(self.plan))

    @property
    def changes(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the settings and the method options that differ from the recipe, except sparsity and seed."""
        unchanged = recipe_plan(self.recipe)
        settings = dataclasses.replace(unchanged.recipe, seed=self.plan.recipe.seed)
        same_method = PlannedRun(self.recipe, dataclasses.replace(unchanged, recipe=settings, method=self.plan.method))
        before, after = dataclasses.asdict(settings), dataclasses.asdict(self.plan.recipe)
        changed = {k: v for k, v in after.items() if v != before[k] and k not in ("sparsity", "seed")}
        return changed, {k: v for k, v in self.options.items() if v != same_method.options[k]}

    @property
    def name(self) -> str:
        """Return the name of the run's folder, which lists everything that differs from the recipe."""
        settings, options = self.changes
        settings.pop("folder", None)
        if str(settings.get("model", "")).startswith(PREFIX):
            settings["model"] = "trained"
        changed = as_assignments({**settings, **options})
        plan = self.plan.recipe
        text = "-".join([self.recipe, self.plan.method, f"{plan.sparsity:g}", *changed, f"seed{plan.seed}"])
        return file_name(text)

    @property
    def arguments(self) -> list[str]:
        """Return the arguments of `optg`, without --output and --device."""
        settings, options = self.changes
        plan = self.plan.recipe
        arguments = ["train", "--recipe", self.recipe, "--method", self.plan.method]
        arguments += ["--sparsity", f"{plan.sparsity!r}", "--seed", f"{plan.seed}"]
        for prefix, values in (("", settings), ("method.", options)):
            for key, value in values.items():
                arguments += flag(prefix, key, value)
        return arguments

    @property
    def key(self) -> str:
        """Return the same string for two runs that train the same thing."""
        return run_key({"settings": dataclasses.asdict(self.plan.recipe), "method": self.plan.method, "options": self.options})


def run_key(summary: dict[str, Any]) -> str:
    """Return the key of a finished run. Settings missing from an older summary count as their defaults.

    So do options, unless the method says what it did before it had them.
    """
    method = METHODS.get(summary["method"])
    settings = dataclasses.asdict(Recipe()) | summary["settings"]
    before = method.added if method else {}
    options = defaults(summary["method"]) | before | current_options(summary["method"], summary["options"])
    settings = {k: v for k, v in settings.items() if k not in EXECUTION_SETTINGS}
    settings["model"] = re.sub(f"{re.escape(PREFIX)}.*/", PREFIX, settings["model"])  # ignore the folder a model is in
    settings["milestones"] = list(settings["milestones"])  # JSON has no tuples
    if settings["max_steps"]:
        settings["epochs"] = None  # has no effect
    if "alpha" in options and options["alpha"] is None:
        options["alpha"] = default_alpha(settings["epochs"] or Clock.of(None, None, settings["max_steps"]).epochs)
    if "every" in options:  # earlier versions recorded "20 epochs" as a number of steps
        options["every"] = in_steps(options["every"], settings)
    if method and method.learns_sparsity:
        settings["sparsity"] = None
    return repr([summary["method"], sorted(settings.items()), sorted(options.items())])


@cache
def recipe_plan(recipe: str) -> Plan:
    """Return a recipe's plan. The result is shared: copy it before changing it."""
    return recipes.load(recipe)


def plan_run(
    recipe: str, method: str, settings: dict[str, Any], options: dict[str, Any], starts_from: PlannedRun | None = None
) -> PlannedRun:
    """Return a run of a recipe and a method with changed settings and method options."""
    plan, types = copy.deepcopy(recipe_plan(recipe)), get_type_hints(Recipe)
    for key, value in settings.items():
        if key not in types:
            raise ValueError(f"unknown setting {key!r}; {nearest(key, types)}")
        value = list(value) if isinstance(value, tuple) else value
        setattr(plan.recipe, key, converted(key, value, types[key]))
    plan.method = method
    plan.methods = {method: {**plan.methods.get(method, {}), **options}}
    if plan.recipe.epochs == 1 and plan.recipe.max_steps is None and getattr(build_method(plan), "every_epochs", None):
        plan.methods[method]["every"] = 1  # a single epoch has no later epoch to cut at, so cut at every step
    check(plan.recipe, f"{recipe}, {method}")
    return PlannedRun(recipe, plan, starts_from)


def in_steps(every: int | str, settings: dict[str, Any]) -> int | str:
    """Return the time between two cuts in steps, if the number of training images is known; else return it unchanged."""
    epochs = epochs_between_cuts(every)
    if not epochs or settings["data"] not in CIFAR or settings["max_steps"] or settings["validate"]:
        return every
    return epochs * (50_000 // settings["batch_size"])
