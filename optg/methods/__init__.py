"""The methods, by the name a user gives. This dict is the only registry: adding a method is one file and one line here."""

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

__all__ = ["METHODS", "Gradual", "Method", *(method.__name__ for method in METHODS.values())]
