"""Parse the arguments of `optg train`.

Which flags exist depends on the method, and their defaults on the recipe. So --recipe and --method are read first, then
everything is parsed against that recipe and that method. Options of the model (--model.KEY VALUE) may have any name, so they
are taken out before.
"""

import inspect
import re
from dataclasses import asdict, dataclass, field, fields, make_dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, Protocol, TypeVar

import tyro

from optg import trust
from optg.naming import nearest
from optg.training.recipe import EXECUTION_SETTINGS, Plan, Recipe, RecipeError, check, load, method_options, parse_value

DESCRIPTION = """Train a model from a recipe and make it sparse.

Example: optg train --recipe vgg19-cifar10 --method rigl --sparsity 0.95

The recipe sets the defaults of the options below, and each method has options of its own: give --recipe and --method together
with --help to see theirs. To continue an interrupted run, give the same command again."""


@dataclass
class RecipeAndMethod:
    """The arguments on which all others depend."""

    recipe: Annotated[str, tyro.conf.arg(metavar="NAME|FILE")] = "digits"  # a recipe from `optg recipes`, or a .toml file
    method: Annotated[str | None, tyro.conf.arg(metavar="NAME")] = None  # a method from `optg methods`


@dataclass
class CodeFlags:
    """The flags that name code to import. A recipe may name the same code, but only the command line allows it."""

    model: str | None = None
    data: str | None = None


TRUST = "run the code that files name as package.module:function; it can do anything that you can"
TrustFlag = Annotated[bool, tyro.conf.FlagCreatePairsOff, tyro.conf.arg(help=TRUST)]


@dataclass
class TrainOptions:
    """How to carry out a run. These options do not change the trained weights."""

    output: Path | None = None  # run folder; by default runs/ and a name made from the settings
    # start over: move the files of an earlier training in the folder to previous-N; by default the run continues
    fresh: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    parallel: Literal["none", "ddp", "fsdp"] = "none"  # how to use several processes, which torchrun starts
    device: str = "auto"  # cuda, cuda:N or cpu; auto: a GPU if there is one
    minutes: float = 10.0  # minutes between checkpoints; the end of an epoch also saves one, if a tenth of this time has passed
    keep: int = 2  # number of checkpoints to keep
    log: tuple[Literal["tensorboard", "wandb", "mlflow"], ...] = ()  # also send the metrics to these (pip install 'optg[NAME]')
    tensorboard: bool = False  # the same as --log tensorboard
    trust: TrustFlag = False


REMOVED_FLAGS = {
    "--no-resume": "give --fresh to begin anew; it moves the files of the earlier training aside",
    "--resume": "leave it out; a run resumes from its newest checkpoint unless --fresh is given",
}
ModelOptions = Annotated[  # a field that appears in the help only: `take_model_options` has parsed these flags before
    dict[str, Any],
    tyro.constructors.PrimitiveConstructorSpec(1, "VALUE", lambda text: {}, lambda value: True, lambda options: [""]),
    tyro.conf.arg(
        name="model.KEY",
        help="option of the model, such as --model.img-size 32; any keyword argument it takes",
        help_behavior_hint="",
    ),
]


class HasModelOptions(Protocol):
    model_options: dict[str, Any]


Options = TypeVar("Options", bound=HasModelOptions)


@dataclass
class RecipeFlags(Recipe):
    """A recipe as flags."""

    model_options: ModelOptions = field(default_factory=dict, kw_only=True)


def parse_train_args(args: list[str]) -> tuple[Plan, TrainOptions]:
    """Return what to train and how, from the arguments of `optg train`. Exit with a message if they are invalid."""
    from optg.methods import METHODS, defaults

    for old, new in REMOVED_FLAGS.items():
        if old in args:
            raise RecipeError(f"{old} is gone: {new}")
    args, model_options = take_model_options(args)
    first, _ = tyro.cli(RecipeAndMethod, args=args, prog="optg train", add_help=False, return_unknown_args=True)
    plan = load(first.recipe)
    plan.method = first.method or plan.method
    options = method_options(plan, first.recipe)  # they become the --method flags
    method = METHODS[plan.method]
    refuse_unknown_options(args, plan.method, [f"--method.{f.name.replace('_', '-')}" for f in fields(method)])
    if method.when == "never" or not method.needs_target:
        plan.recipe.sparsity = 0.0  # `sparsify` refuses any other, should the command line ask for one
    documented = with_help(method)
    everything = make_dataclass(
        "Train",
        [
            ("first", Annotated[RecipeAndMethod, tyro.conf.arg(name="")]),
            ("options", Annotated[TrainOptions, tyro.conf.arg(name="")]),
            ("recipe", Annotated[RecipeFlags, tyro.conf.arg(name="")]),
            ("method", Annotated[documented, tyro.conf.arg(help=f"options of {plan.method}")]),
        ],
    )
    flags = RecipeFlags(**vars(plan.recipe) | {"model_options": {}})
    default = everything(RecipeAndMethod(first.recipe, plan.method), TrainOptions(), flags, documented(**options))
    given: Any = tyro.cli(everything, args=args, default=default, prog="optg train", description=DESCRIPTION)
    usual = defaults(plan.method)
    values = {f.name: getattr(given.method, f.name) for f in fields(given.method)}
    plan.methods = {plan.method: {name: value for name, value in values.items() if value != usual[name]}}
    inherited = plan.recipe.model_options if given.recipe.model == plan.recipe.model else {}
    recipe = Recipe(**vars(given.recipe) | {"model_options": inherited | model_options})
    if not any(arg.partition("=")[0] == "--sparsity" for arg in args):
        from optg.core.assignment import implied_sparsity

        recipe.sparsity = implied_sparsity(recipe.structure) or recipe.sparsity
    plan.changes = changed(plan.recipe, recipe) | {f"method.{k}": v for k, v in values.items() if v != options[k]}
    plan.recipe = check(recipe, "command line")
    named, _ = tyro.cli(CodeFlags, args=args, prog="optg train", add_help=False, return_unknown_args=True)
    trust.allow(named.model)
    trust.allow(named.data)
    if given.options.trust:
        trust.allow_everything()
    return plan, given.options


def refuse_unknown_options(args: list[str], method: str, known: list[str]) -> None:
    """Raise if a flag names an option of another method."""
    for arg in args:
        flag = arg.partition("=")[0].replace("_", "-")
        if flag.startswith("--method.") and flag.replace(".no-", ".") not in known:
            raise RecipeError(f"{method} has no option {flag}; {nearest(flag, known)}")


def take_model_options(args: list[str]) -> tuple[list[str], dict[str, Any]]:
    """Split off --model.KEY VALUE and --model.KEY=VALUE. Return the other arguments, and the options with parsed values."""
    rest, options, remaining = [], {}, iter(args)
    for arg in remaining:
        flag, equals, value = arg.partition("=")
        if not flag.startswith("--model."):
            rest.append(arg)
            continue
        key = flag.removeprefix("--model.").replace("-", "_")
        text = value if equals else next(remaining, None)
        if not key.isidentifier() or text is None or text.startswith("--"):
            raise RecipeError(f"{arg} has no value; expected an option of the model and its value, such as --model.img-size 32")
        options[key] = parse_value(text)
    return rest, options


def parse_with_model_options(kind: type[Options], args: list[str], prog: str, description: str | None) -> Options:
    """Parse the arguments of a command that builds a model by name. `kind` has a field `model_options`."""
    args, model_options = take_model_options(args)
    options = tyro.cli(kind, args=args, prog=prog, description=description)
    options.model_options = model_options
    return options


def changed(before: Recipe, after: Recipe) -> dict[str, Any]:
    """Return the settings that differ, except those that every run's name states and those that change no weights."""
    unnamed, old = ("sparsity", "seed", *EXECUTION_SETTINGS), asdict(before)
    return {key: value for key, value in asdict(after).items() if value != old[key] and key not in unnamed}


def with_help(method: type[Any]) -> type[Any]:
    """Return a subclass in which every option has help: its comment, or else the comment in the base class that declares it."""
    options = []
    for option in fields(method):
        comments = (comment_of(base, option.name) for base in method.__mro__ if option.name in vars(base))
        text = tyro.conf.arg(help=next(filter(None, comments), None))
        options.append((option.name, Annotated[option.type, text], field(default=option.default)))
    return make_dataclass(method.__name__, options, bases=(method,))


source_of = cache(inspect.getsource)  # it parses the whole file of a class


def comment_of(owner: Any, option: str) -> str | None:
    """Return the comment in the source code at the end of an option's line, or on the line above it."""
    found = re.search(rf"(?m)^(?:    # (.*)\n)?    {option}: .*?(?:  # (.*))?$", source_of(owner))
    return (found[2] or found[1]) if found else None
