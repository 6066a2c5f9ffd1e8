"""The methods, by the name a user gives. This dict is the only registry: adding a method is one file and one line here."""

from optg.methods.base import Gradual, Method
from optg.methods.dense import Dense
from optg.methods.gmp import GMP
from optg.methods.optg import OptG
from optg.methods.rigl import RigL

METHODS: dict[str, type[Method]] = {
    "dense": Dense,
    "gmp": GMP,
    "optg": OptG,
    "rigl": RigL,
}

__all__ = ["GMP", "METHODS", "Dense", "Gradual", "Method", "OptG", "RigL"]
