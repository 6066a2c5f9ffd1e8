"""Adding a method takes one file and one line. Here: this file, and the line in the fixture."""

import inspect
from dataclasses import dataclass
from typing import ClassVar

import pytest

from optg import cli
from optg.methods import METHODS, Gradual
from tests.methods import test_contract as contract


@dataclass
class Toy(Gradual):
    """Removes the largest weights, which no paper recommends."""

    paper: ClassVar[str] = "nobody 1900"
    revives: ClassVar[bool] = False

    every: int | None = 2
    colour: str = "blue"

    def scores(self, weights):
        return [(1 / (1 + value.abs())).where(mask, -1.0) for value, mask in zip(weights.values, weights.masks)]


@pytest.fixture(autouse=True)
def register(monkeypatch):
    monkeypatch.setitem(METHODS, "toy", Toy)


PROMISES = [
    test
    for name, test in vars(contract).items()
    if name.startswith("test_") and name != "test_it_names_its_paper"  # which expects the file in optg/methods
]


@pytest.mark.parametrize("promise", PROMISES, ids=lambda test: test.__name__)
def test_it_keeps_every_promise(promise):
    others = {"optimizer": contract.OPTIMIZERS, "sparsity": [0.5, 0.987]}
    [extra] = [p for p in inspect.signature(promise).parameters if p != "name"] or [None]
    for value in others[extra] if extra else [None]:
        promise(**{"name": "toy", **({extra: value} if extra else {})})


def test_the_command_line_lists_it(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["optg", "methods", "--markdown"])
    cli.main()
    [row] = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| `toy`")]
    assert "nobody 1900" in row and "colour='blue'" in row and "every=2" in row
