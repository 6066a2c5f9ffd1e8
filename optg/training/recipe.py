"""A recipe says all that a run depends on, in a TOML file: model, data, learning rate, method and its options.

Recipes that come with the package have a name and may have variants (`vgg19-cifar10`, `vgg19-cifar10:authors`); any other is
the path of a file. A run saves the recipe it was given, resolved, and can be trained again from that.
"""

import dataclasses
import tomllib
from dataclasses import dataclass, field, fields
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin, get_type_hints

from optg.naming import nearest

if TYPE_CHECKING:
    from optg.methods import Method


@dataclass
class Recipe:
    model: str = "digits"  # a name, torchvision:NAME, timm:NAME or package.module:function
    data: str = "digits"  # digits, cifar10, cifar100, imagenet, synthetic or package.module:function
    folder: str | None = None  # that has the data; None: ./data
    sparsity: float = 0.95  # the share of weights to remove
    epochs: int = 25
    batch_size: int = 64  # over all GPUs together
    seed: int = 0
    optimizer: Literal["sgd", "adamw"] = "sgd"
    lr: float = 0.05
    momentum: float = 0.9
    nesterov: bool = False
    weight_decay: float = 2e-3
    decay_norms: bool = True  # does weight decay act on norms and biases too?
    schedule: Literal["cosine", "multistep", "hold", "constant"] = "cosine"  # hold: at first constant, then cosine
    warmup: float = 0.0  # epochs in which the learning rate rises to its full value
    cycles: int = 1  # how often the learning rate starts anew
    milestones: tuple[float, ...] = (0.5, 0.75)  # of training, where multistep multiplies the learning rate by gamma
    gamma: float = 0.1
    hold: float = 0.5  # of training: how long "hold" holds
    rate_per: Literal["step", "epoch"] = "step"  # how often the learning rate changes
    label_smoothing: float = 0.0
    accumulate: int = 1  # parts that a batch is split into, one after the other
    precision: Literal["float32", "bfloat16"] = "float32"
    channels_last: bool = False
    compile: bool = False  # the model with torch.compile, on a GPU
    graph: bool = True  # replay whole steps from a CUDA graph, where there is one GPU


HOW = ("folder", "graph", "compile")  # settings that say where data is and how it is computed, not what


@dataclass
class Plan:
    """A recipe with the method that it uses and, by method, options that differ from a method's own defaults."""

    recipe: Recipe
    method: str = "optg"
    methods: dict[str, dict[str, Any]] = field(default_factory=dict)
    name: str = "recipe"


class RecipeError(ValueError):
    """A recipe that cannot be used: what is wrong, where, and what was expected."""


FOLDER = files("optg.training") / "recipes"


def names() -> list[str]:
    """The recipes that come with the package, variants too."""
    found = []
    for file in sorted(FOLDER.iterdir(), key=lambda file: file.name):
        name = file.name.removesuffix(".toml")
        found += [name, *(f"{name}:{variant}" for variant in tomllib.loads(file.read_text()).get("variants", {}))]
    return found


def load(given: str) -> Plan:
    """The recipe of a name, a name with a variant, or a file."""
    if given.endswith(".toml") or "/" in given:
        path = Path(given)
        if not path.is_file():
            raise RecipeError(f"there is no recipe file {given}")
        return read(path.read_text(errors="replace"), given, path.parent.name if path.name == "recipe.toml" else path.stem)
    if given not in names():
        raise RecipeError(f"unknown recipe {given!r}; {nearest(given, names())}; or give the path of a .toml file")
    name, _, variant = given.partition(":")
    return read((FOLDER / f"{name}.toml").read_text(), given, given, variant)


def read(text: str, where: str, name: str, variant: str = "") -> Plan:
    try:
        values = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise RecipeError(f"{where} is not TOML: {error}") from None
    variants = values.pop("variants", {})
    if not isinstance(variants, dict) or not all(isinstance(changes, dict) for changes in variants.values()):
        raise RecipeError(f"{where}: variants holds a table of settings for each variant, such as [variants.authors]")
    changed = variants.get(variant, {})
    changed_methods = changed.pop("methods", {})
    values |= changed
    method, methods = values.pop("method", "optg"), values.pop("methods", {})
    known = {f.name for f in fields(Recipe)}
    for key in values:
        if key not in known:
            raise RecipeError(f"{where}: unknown setting {key!r}; {nearest(key, known)}")
    if not isinstance(methods, dict) or not all(isinstance(options, dict) for options in methods.values()):
        raise RecipeError(f"{where}: methods holds a table of options for each method, such as [methods.rigl]")
    if not isinstance(method, str):
        raise RecipeError(f'{where}: method is {method!r}; expected a name, such as "optg"')
    refuse_unknown_methods(where, methods)
    hints = get_type_hints(Recipe)
    recipe = Recipe(**{key: converted(f"{where}: {key}", value, hints[key]) for key, value in values.items()})
    return Plan(check(recipe, where), method, methods | changed_methods, name)


def refuse_unknown_methods(where: str, methods: dict[str, Any]) -> None:
    from optg.methods import METHODS

    for name in methods:
        if name not in METHODS:
            raise RecipeError(f"{where}: [methods.{name}] is of no method; {nearest(name, METHODS)}")


def converted(what: str, value: Any, kind: Any) -> Any:
    """A TOML value as the type that a field wants."""
    if get_origin(kind) is Literal:
        if value not in get_args(kind):
            raise RecipeError(f"{what} is {value!r}; expected one of {', '.join(get_args(kind))}")
        return value
    if get_origin(kind) is tuple:
        if not isinstance(value, list) or not all(isinstance(v, (int, float)) for v in value):
            raise RecipeError(f"{what} is {value!r}; expected a list of numbers")
        return tuple(float(v) for v in value)
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
    """The plan's method with the plan's options for it."""
    from optg.methods import METHODS

    if plan.method not in METHODS:
        raise RecipeError(f"unknown method {plan.method!r}; {nearest(plan.method, METHODS)}")
    kind, options = METHODS[plan.method], plan.methods.get(plan.method, {})
    hints = get_type_hints(kind)
    known = [f.name for f in fields(kind)]
    for key in options:
        if key not in known:
            raise RecipeError(f"{where}: {plan.method} has no option {key!r}; {nearest(key, known)}")
    own = {"seed": plan.recipe.seed} if "seed" in known else {}  # of a method's random numbers, where it has any
    given = {key: converted(f"{where}: {plan.method}.{key}", value, hints[key]) for key, value in options.items()}
    return kind(**own | given)


def check(recipe: Recipe, where: str) -> Recipe:
    """Refuse values that no run can have."""
    limits = {
        "sparsity": (recipe.sparsity >= 0 and recipe.sparsity < 1, "at least 0 and below 1"),
        "epochs": (recipe.epochs >= 1, "at least 1"),
        "batch_size": (recipe.batch_size >= 1, "at least 1"),
        "lr": (0 < recipe.lr < float("inf"), "above 0"),
        "momentum": (0 <= recipe.momentum < 1, "at least 0 and below 1"),
        "weight_decay": (recipe.weight_decay >= 0, "at least 0"),
        "warmup": (0 <= recipe.warmup < recipe.epochs, "at least 0 and below epochs"),
        "cycles": (1 <= recipe.cycles <= recipe.epochs, "at least 1 and at most epochs"),
        "seed": (0 <= recipe.seed < 2**63, "at least 0 and below 2^63"),
        "gamma": (0 < recipe.gamma < float("inf"), "above 0"),
        "milestones": (all(0 < m < 1 for m in recipe.milestones), "shares of training, between 0 and 1"),
        "hold": (0 <= recipe.hold < 1, "at least 0 and below 1"),
        "label_smoothing": (0 <= recipe.label_smoothing < 1, "at least 0 and below 1"),
        "accumulate": (
            recipe.accumulate >= 1 and recipe.batch_size % recipe.accumulate == 0,
            f"a divisor of batch_size, {recipe.batch_size}",
        ),
        "nesterov": (not recipe.nesterov or recipe.momentum > 0, "false where momentum is 0"),
    }
    for name, (fine, expected) in limits.items():
        if not fine:
            raise RecipeError(f"{where}: {name} is {getattr(recipe, name)}; expected {expected}")
    return recipe


def dump(plan: Plan) -> str:
    """The plan as TOML, every setting spelled out."""
    lines = [f"method = {toml(plan.method)}"]
    lines += [f"{k} = {toml(v)}" for k, v in dataclasses.asdict(plan.recipe).items() if v is not None]
    for method, options in plan.methods.items():
        lines += ["", f"[methods.{toml(method)}]", *(f"{k} = {toml(v)}" for k, v in options.items())]
    return "\n".join(lines) + "\n"


def flag(prefix: str, key: str, value: Any) -> list[str]:
    """A setting, or an option of a method (`prefix` "method."), as `optg train` takes it."""
    name = key.replace("_", "-")
    if isinstance(value, bool):
        return [f"--{prefix}{'' if value else 'no-'}{name}"]
    return [f"--{prefix}{name}", *map(str, value if isinstance(value, (list, tuple)) else [value])]


def toml(value: Any) -> str:
    if value is None:
        return '"none"'  # TOML has no word for it
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        escaped = value.replace("\\", "\\\\").replace('"', '\\"')
        return f'"{escaped}"'
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(toml(v) for v in value)}]"
    return repr(value)
