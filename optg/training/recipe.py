"""Recipes: TOML files that state everything a run depends on: model, data, learning rate, method and its options.

Recipes that come with the package are loaded by name and may have variants (`vgg19-cifar10`, `vgg19-cifar10:authors`); any
other is loaded by path. Each run saves its complete recipe, from which it can be repeated.
"""

import dataclasses
import json
import re
import tomllib
from dataclasses import dataclass, field, fields
from datetime import date, time
from importlib.resources import files
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin, get_type_hints

from optg.files import read_bytes
from optg.naming import nearest
from optg.trust import FOUND_IN

if TYPE_CHECKING:
    from optg.methods import Method


@dataclass
class Recipe:
    model: str = "digits"  # a built-in model's name, torchvision:NAME, timm:NAME or package.module:function
    model_options: dict[str, Any] = field(default_factory=dict, kw_only=True)  # keyword arguments of the model
    data: str = "digits"  # digits, cifar10, cifar100, imagenet, synthetic or package.module:function
    folder: str | None = None  # folder that holds the dataset's files; None: ./data
    # hold out the last tenth of the training images and measure on them; use the test images once, at the end
    validate: bool = field(default=False, kw_only=True)
    sparsity: float = 0.95  # fraction of the weights to remove
    floor: float | None = None  # smallest fraction of its weights that every part of a layer keeps
    # what keeps that fraction: every part of a layer, or every output neuron
    floor_by: Literal["part", "output"] = field(default="part", kw_only=True)
    structure: str = "unstructured"  # what is removed together: unstructured, N:M, RxC, channel; or PATTERN=STRUCTURE, …
    epochs: int = 25  # epochs to train
    max_steps: int | None = field(default=None, kw_only=True)  # optimizer steps to train, instead of epochs
    batch_size: int = 64  # images per optimizer step, over all GPUs together
    seed: int = 0  # seed of all random numbers
    optimizer: Literal["sgd", "adamw"] = "sgd"  # sgd or adamw; for others use optg.sparsify in your own loop
    lr: float = 0.05  # peak learning rate
    momentum: float = 0.9  # momentum of SGD
    nesterov: bool = False  # use Nesterov momentum
    weight_decay: float = 2e-3  # weight decay
    decay_norms: bool = True  # apply weight decay to norms and biases too
    # schedule of the learning rate; hold: constant, then cosine
    schedule: Literal["cosine", "multistep", "hold", "constant"] = "cosine"
    warmup: float = 0.0  # epochs over which the learning rate rises to its peak
    cycles: int = 1  # number of equal cycles, each of which restarts the learning rate schedule
    milestones: tuple[float, ...] = (0.5, 0.75)  # where multistep changes the learning rate, as fractions of training
    gamma: float = 0.1  # multistep multiplies the learning rate by this at each milestone
    hold: float = 0.5  # fraction of training during which the schedule "hold" stays constant
    rate_per: Literal["step", "epoch"] = "step"  # update the learning rate every step, or once per epoch
    label_smoothing: float = 0.0  # label smoothing of the loss
    accumulate: int = 1  # split each batch into this many parts and accumulate their gradients, to save memory
    precision: Literal["float32", "bfloat16"] = "float32"  # bfloat16 uses autocast
    channels_last: bool = False  # store images and weights in channels-last order
    compile: bool = False  # compile the model with torch.compile, on a GPU
    # quantize weights and activations in forward, with frozen masks, in the last part of training; see docs/int8.md
    quantize: Literal["int8"] | None = field(default=None, kw_only=True)
    quantize_from: float = field(default=0.9, kw_only=True)  # where the quantized part begins, as a share of training
    graph: bool = True  # replay training steps from a CUDA graph, when training on one GPU


# Settings that recipes of earlier versions lack.
ADDED = {"validate": False, "structure": "unstructured", "floor_by": "part", "quantize_from": 0.9}
EXECUTION_SETTINGS = ("folder", "graph", "compile")  # settings that change how a run is computed, but not what


@dataclass
class Plan:
    """A recipe together with the name of its method and, for each method, the options that differ from its defaults.

    `changes` are the flags of `optg train` that changed the recipe, such as {"epochs": 80, "method.alpha": 0.7}.
    """

    recipe: Recipe
    method: str = "optg"
    methods: dict[str, dict[str, Any]] = field(default_factory=dict)
    name: str = "recipe"
    changes: dict[str, Any] = field(default_factory=dict)


class RecipeError(ValueError):
    """A recipe is invalid. The message says what is wrong, where, and what was expected."""


FOLDER = files("optg.training") / "recipes"


def names() -> list[str]:
    """Return the names of the recipes that come with the package, including their variants."""
    found = []
    for file in sorted(FOLDER.iterdir(), key=lambda file: file.name):
        name = file.name.removesuffix(".toml")
        found += [name, *(f"{name}:{variant}" for variant in tomllib.loads(file.read_text()).get("variants", {}))]
    return found


def load(given: str) -> Plan:
    """Load a recipe by name (`vgg19-cifar10`), name and variant (`vgg19-cifar10:authors`) or path (`my.toml`)."""
    if given.endswith(".toml") or "/" in given:
        path = Path(given)
        if not path.is_file():
            raise RecipeError(f"there is no recipe file {given}")
        return read_file(path, read_bytes(path))
    if given not in names():
        raise RecipeError(f"unknown recipe {given!r}; {nearest(given, names())}; or give the path of a .toml file")
    name, _, variant = given.partition(":")
    return read((FOLDER / f"{name}.toml").read_text(), given, given, variant)


def read_file(path: Path, content: bytes) -> Plan:
    """Parse and check the content of a recipe file. The recipe of a run is named after the run's folder."""
    name = path.resolve().parent.name if path.name == "recipe.toml" else path.stem
    return read(content.decode(errors="replace"), str(path), name)


def read(text: str, where: str, name: str, variant: str = "") -> Plan:
    """Parse and check a recipe. `where` names its source in error messages."""
    try:
        values = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # a TOMLDecodeError, or an integer of over 4,300 digits
        raise RecipeError(f"{where} is not valid TOML: {error}") from None
    variants = values.pop("variants", {})
    if not isinstance(variants, dict) or not all(isinstance(changes, dict) for changes in variants.values()):
        raise RecipeError(f"{where}: variants must be a table of settings per variant, such as [variants.authors]")
    changed = variants.get(variant, {})
    changed_methods = changed.pop("methods", {})
    values |= changed
    method, methods = values.pop("method", "optg"), values.pop("methods", {})
    known = [f.name for f in fields(Recipe)]
    for key in values:
        if key not in known:
            raise RecipeError(f"{where}: unknown setting {key!r}; {nearest(key, known)}")
    if not isinstance(methods, dict) or not all(isinstance(options, dict) for options in methods.values()):
        raise RecipeError(f"{where}: methods must be a table of options per method, such as [methods.rigl]")
    if not isinstance(method, str):
        raise RecipeError(f'{where}: method is {method!r}; expected a name, such as "optg"')
    refuse_unknown_methods(where, methods)
    hints = get_type_hints(Recipe)
    recipe = Recipe(**{key: converted(f"{where}: {key}", value, hints[key]) for key, value in values.items()})
    FOUND_IN.update(dict.fromkeys((recipe.model, recipe.data), where))
    return Plan(check(recipe, where), method, methods | changed_methods, name)


def refuse_unknown_methods(where: str, methods: dict[str, Any]) -> None:
    from optg.methods import METHODS

    for name in methods:
        if name not in METHODS:
            raise RecipeError(f"{where}: [methods.{name}] names an unknown method; {nearest(name, METHODS)}")


def converted(what: str, value: Any, kind: Any) -> Any:
    """Return a TOML value as the type of a dataclass field. `what` names the value in error messages."""
    if isinstance(value, int) and abs(value) >= 10**30:
        raise RecipeError(f"{what} has {len(str(abs(value)))} digits; expected at most 30")
    if get_origin(kind) is Literal:
        if value not in get_args(kind):
            raise RecipeError(f"{what} is {value!r}; expected one of {', '.join(get_args(kind))}")
        return value
    if get_origin(kind) is tuple:
        if not isinstance(value, list) or not all(isinstance(v, (int, float)) for v in value):
            raise RecipeError(f"{what} is {value!r}; expected a list of numbers")
        return tuple(float(v) for v in value)
    if get_origin(kind) is dict:
        if not isinstance(value, dict):
            raise RecipeError(f"{what} is {value!r}; expected a table")
        return value
    expected = tuple(get_args(kind)) or (kind,)
    if value in ("none", None) and type(None) in expected:
        return None
    for choice in expected:
        if get_origin(choice) is Literal and value in get_args(choice):
            return value
        if type(value) is choice or (choice is float and type(value) is int):
            return choice(value)
    wanted = [", ".join(map(repr, get_args(e))) if get_origin(e) is Literal else e.__name__ for e in expected]
    raise RecipeError(f"{what} is {value!r}; expected {' or '.join(wanted).replace('NoneType', 'none')}")


def build_method(plan: Plan, where: str = "recipe") -> "Method":
    """Return the plan's method, with the plan's options for it."""
    from optg.methods import METHODS

    options = method_options(plan, where)
    return METHODS[plan.method](**options)


def method_options(plan: Plan, where: str = "recipe") -> dict[str, Any]:
    """Return every option of the plan's method: the plan's value if it has one, else the default."""
    from optg.methods import METHODS, current_options, defaults

    if plan.method not in METHODS:
        raise RecipeError(f"unknown method {plan.method!r}; {nearest(plan.method, METHODS)}")
    kind, options = METHODS[plan.method], current_options(plan.method, plan.methods.get(plan.method, {}))
    hints = get_type_hints(kind)
    known = [f.name for f in fields(kind)]
    for key in options:
        if key not in known:
            raise RecipeError(f"{where}: {plan.method} has no option {key!r}; {nearest(key, known)}")
    seed = {"seed": plan.recipe.seed} if "seed" in known else {}
    given = {key: converted(f"{where}: {plan.method}.{key}", value, hints[key]) for key, value in options.items()}
    return defaults(plan.method) | seed | given


def check(recipe: Recipe, where: str) -> Recipe:
    """Return the recipe if all its values are valid; else raise an error that names the first invalid one."""
    limits = {
        "sparsity": (recipe.sparsity >= 0 and recipe.sparsity < 1, "at least 0 and below 1"),
        "floor": (recipe.floor is None or 0 < recipe.floor < 1, "above 0 and below 1, or none"),
        "floor_by": (recipe.floor is not None or recipe.floor_by == "part", "part where no floor is given"),
        "epochs": (1 <= recipe.epochs < 2**31, "at least 1 and below 2^31"),
        "max_steps": (recipe.max_steps is None or 1 <= recipe.max_steps < 2**63, "at least 1 and below 2^63"),
        "batch_size": (1 <= recipe.batch_size < 2**31, "at least 1 and below 2^31"),
        "lr": (0 < recipe.lr < inf, "above 0"),
        "momentum": (0 <= recipe.momentum < 1, "at least 0 and below 1"),
        "weight_decay": (0 <= recipe.weight_decay < inf, "at least 0"),
        "warmup": (0 <= recipe.warmup < (inf if recipe.max_steps else recipe.epochs), "at least 0 and below epochs"),
        "cycles": (
            1 <= recipe.cycles <= (recipe.max_steps or recipe.epochs),
            f"at least 1 and at most {'max_steps' if recipe.max_steps else 'epochs'}",
        ),
        "seed": (0 <= recipe.seed < 2**63, "at least 0 and below 2^63"),
        "gamma": (0 < recipe.gamma < inf, "above 0"),
        "milestones": (all(0 < m < 1 for m in recipe.milestones), "fractions of training, between 0 and 1"),
        "hold": (0 <= recipe.hold < 1, "at least 0 and below 1"),
        "label_smoothing": (0 <= recipe.label_smoothing < 1, "at least 0 and below 1"),
        "accumulate": (
            recipe.accumulate >= 1 and recipe.batch_size % recipe.accumulate == 0,
            f"a divisor of batch_size, {recipe.batch_size}",
        ),
        "quantize_from": (0 < recipe.quantize_from < 1, "a share of training, above 0 and below 1"),
        "nesterov": (not recipe.nesterov or recipe.momentum > 0, "false if momentum is 0"),
    }
    for name, (fine, expected) in limits.items():
        if not fine:
            raise RecipeError(f"{where}: {name} is {getattr(recipe, name)}; expected {expected}")
    return recipe


def dump(plan: Plan) -> str:
    """Return the plan as TOML, with every setting written out."""
    lines = [f"method = {toml(plan.method)}"]
    settings = dataclasses.asdict(plan.recipe)
    options = settings.pop("model_options")
    for key, default in ADDED.items():  # recipes of earlier versions, with which a run may be continued, do not have these
        if settings[key] == default:
            del settings[key]
    lines += [f"{k} = {toml(v)}" for k, v in settings.items() if v is not None]
    tables = {"model_options": options} if options else {}
    tables |= {f"methods.{toml(method)}": options for method, options in plan.methods.items()}
    for name, options in tables.items():
        lines += ["", f"[{name}]", *(f"{toml_key(k)} = {toml(v)}" for k, v in options.items())]
    return "\n".join(lines) + "\n"


def flag(prefix: str, key: str, value: Any) -> list[str]:
    """Return the command-line flag of `optg train` that sets a recipe setting, or with prefix "method." a method's option."""
    name = key.replace("_", "-")
    if key == "model_options":
        return [text for k, v in value.items() for text in (f"--model.{k.replace('_', '-')}", plain_or_toml(v))]
    if isinstance(value, bool):
        return [f"--{prefix}{'' if value else 'no-'}{name}"]
    return [f"--{prefix}{name}", *map(str, value if isinstance(value, (list, tuple)) else [value])]


def refuse_model_options(what: object, model_options: dict[str, Any]) -> None:
    """Raise if there are options for the model of a run, which is built as it was trained."""
    for key in model_options:
        raise RecipeError(f"{what} is opened as it was trained; leave out --model.{key.replace('_', '-')}")


def parse_value(text: str) -> Any:
    """Parse a value on the command line as TOML. Anything else is a string."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except (ValueError, RecursionError):
        return text


def plain_or_toml(value: Any) -> str:
    """Return the text that `parse_value` reads as the value: a string as it is, if possible."""
    return value if isinstance(value, str) and parse_value(value) == value else toml(value)


def toml(value: Any) -> str:
    """Return a value as TOML."""
    if value is None:
        return '"none"'  # TOML has no null
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return toml_string(value)
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(toml(v) for v in value)}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{toml_string(str(k))} = {toml(v)}' for k, v in value.items())}}}"
    return value.isoformat() if isinstance(value, (date, time)) else repr(value)


def toml_string(text: str) -> str:
    """Return a text as a basic string of TOML, on one line."""
    if surrogate := next((c for c in text if "\ud800" <= c <= "\udfff"), None):
        raise RecipeError(f"{text!r} is not Unicode text, because of {surrogate!r}; give another name, or rename the file")
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def toml_key(text: str) -> str:
    """Return a key of TOML, in quotes if necessary."""
    return text if re.fullmatch(r"[\w-]+", text, re.ASCII) else toml_string(text)
