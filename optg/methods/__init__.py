"""The methods, by the name a user gives. This dict is the only registry: adding a method is one file and one line here."""

from dataclasses import fields
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
from optg.methods.optg import OptG
from optg.methods.rigl import RigL
from optg.methods.set import SET
from optg.methods.snip import SNIP
from optg.methods.st3 import ST3, ST3Sigma
from optg.methods.str import STR
from optg.methods.supermask import Supermask
from optg.methods.synflow import SynFlow
from optg.methods.taylor import Taylor

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
    """The options of a method with their defaults; none of one that is no more."""
    return {field.name: field.default for field in fields(METHODS[name])} if name in METHODS else {}


def describe() -> list[dict[str, str]]:
    """What there is to know of each method, for tables: the README's is made from it."""
    rows = []
    for name, method in METHODS.items():
        back = "its value" if method.keeps_pruned else "0"
        options = [f"{key}={value!r}" for key, value in defaults(name).items()]
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
    """The table of `describe`, or some columns of it."""
    columns = columns or tuple(describe()[0])
    rows = [[f"`{row[c]}`" if c == "name" else row[c] for c in columns] for row in describe()]
    return "\n".join("| " + " | ".join(line) + " |" for line in [columns, ["---"] * len(columns), *rows]) + "\n"
