"""The methods by name. METHODS is the only registry: to add a method, write one file and add one line here."""

from dataclasses import fields, replace
from typing import Any

from optg.methods.acdc import ACDC
from optg.methods.base import Gradual, Method
from optg.methods.dense import Dense
from optg.methods.dnw import DNW
from optg.methods.dpf import DPF
from optg.methods.feather import Feather
from optg.methods.gmp import GMP
from optg.methods.granet import GraNet
from optg.methods.grasp import GraSP
from optg.methods.gsm import GSM
from optg.methods.imp import IMP
from optg.methods.keep import Keep
from optg.methods.optg import OptG
from optg.methods.phoenix import Phoenix
from optg.methods.rigl import RigL
from optg.methods.s_ste import SSTE
from optg.methods.set import SET
from optg.methods.snip import SNIP
from optg.methods.sr_ste import SRSTE
from optg.methods.st3 import ST3, ST3Sigma
from optg.methods.str_ import STR
from optg.methods.supermask import Supermask
from optg.methods.synflow import SynFlow
from optg.methods.taylor import Taylor
from optg.naming import nearest

METHODS: dict[str, type[Method]] = {
    "dense": Dense,
    "snip": SNIP,
    "grasp": GraSP,
    "synflow": SynFlow,
    "taylor": Taylor,
    "gmp": GMP,
    "imp": IMP,
    "set": SET,
    "rigl": RigL,
    "granet": GraNet,
    "dpf": DPF,
    "dnw": DNW,
    "gsm": GSM,
    "str": STR,
    "supermask": Supermask,
    "optg": OptG,
    "acdc": ACDC,
    "st3": ST3,
    "st3-sigma": ST3Sigma,
    "feather": Feather,
    "phoenix": Phoenix,
    "sr-ste": SRSTE,
    "s-ste": SSTE,
    "keep": Keep,
}

__all__ = [
    "METHODS",
    "Gradual",
    "Method",
    "defaults",
    "describe",
    "markdown",
    *(method.__name__ for method in METHODS.values()),
]


def defaults(name: str) -> dict[str, Any]:
    """Return the options of a method with their defaults; empty for a name that no longer exists."""
    return {field.name: field.default for field in fields(METHODS[name])} if name in METHODS else {}


def current_options(name: str, options: dict[str, Any]) -> dict[str, Any]:
    """Return options that an earlier version may have saved, as this version has them."""
    return METHODS[name].current_options(options) if name in METHODS else options


def resolve(method: str | Method) -> tuple[str, Method]:
    """Return a method's registered name and a new instance of it."""
    if isinstance(method, Method):
        names = [name for name, known in METHODS.items() if known is type(method)]
        return (names[0] if names else type(method).__name__), replace(method)
    if not isinstance(method, str):
        raise TypeError(f"method is {method!r}; expected the name or an instance of a method, such as 'optg' or OptG()")
    if method not in METHODS:
        raise ValueError(f"unknown method {method!r}; {nearest(method, METHODS)}")
    return method, METHODS[method]()


def describe() -> list[dict[str, str]]:
    """Return the facts about each method, for tables; docs/methods.md is made from them."""
    rows = []
    for name, method in METHODS.items():
        back = "its value" if method.keeps_pruned else "0"
        shared = {(field.name, field.default) for field in fields(Method)}  # the options of every method, at their defaults
        options = [f"{key}={value!r}" for key, value in defaults(name).items() if (key, value) not in shared]
        rows.append(
            {
                "name": name,
                "paper": method.paper,
                "prunes": f"{method.when} training" if method.when != "never" else "never",
                "revives to": back if method.revives else "–",
                "options": ", ".join(options) or "–",
            }
        )
    return rows


def markdown(*columns: str) -> str:
    """Return the table of `describe`, or some of its columns, as Markdown."""
    columns = columns or tuple(describe()[0])
    rows = [[f"`{row[c]}`" if c == "name" else row[c] for c in columns] for row in describe()]
    return "\n".join("| " + " | ".join(line) + " |" for line in [columns, ["---"] * len(columns), *rows]) + "\n"
