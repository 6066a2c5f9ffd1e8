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
