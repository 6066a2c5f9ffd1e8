"""Packages: CI installs pinned versions, and a user without the extras is told what to install."""

import re
import tomllib
from importlib.metadata import version
from pathlib import Path

import pytest

from tests.architecture.blocked import run_without

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PINNED = dict(re.findall(r"^([\w-]+)==([\w.]+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE))


def required() -> list[str]:
    """Return the names of all packages in pyproject.toml, the extras included."""
    lists = [PROJECT["dependencies"], *PROJECT["optional-dependencies"].values()]
    return sorted({re.split(r"[^\w-]", line)[0] for lines in lists for line in lines} - {"optg"})


@pytest.mark.parametrize("package", required())
def test_every_package_is_pinned_and_installed(package: str) -> None:
    assert package in PINNED, f"add {package} to constraints.txt"
    assert version(package).partition("+")[0] == PINNED[package], "run `make clean test`, or update constraints.txt"


def test_every_pin_is_needed() -> None:
    assert {*PINNED} - {"setuptools"} == {*required()}


@pytest.mark.parametrize(("missing", "arguments"), [("tyro", ["--help"]), ("rich", ["methods"])])
def test_the_command_says_which_package_is_missing(missing: str, arguments: list[str]) -> None:
    program = f"sys.argv = {['optg', *arguments]}\nfrom optg.cli import main\nmain()"
    done = run_without((missing,), program)
    assert done.returncode != 0 and len(done.stderr.splitlines()) == 1, done.stderr
    assert missing in done.stderr and "pip install 'optg[cli]'" in done.stderr


def test_the_library_needs_no_package_of_the_command_line() -> None:
    program = """
import torch, optg
from optg.data import digits

images, labels = digits.load()[1]
model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
sparsifier = optg.sparsify(model, optimizer, sparsity=0.9, epochs=2, steps_per_epoch=1)
for _ in range(2):
    torch.nn.functional.cross_entropy(model(images), labels).backward()
    optimizer.step()
sparsifier.finish()
assert sparsifier.layers()[0].kept == 64
fast = optg.compile(model, images[:1])
assert torch.allclose(fast(images), model(images), atol=1e-4) and "1.weight" in repr(fast)
"""
    done = run_without(("rich", "tyro", "PIL", "matplotlib"), program)
    assert done.returncode == 0, done.stderr
