"""Fixtures of the deployment tests: a trained run, and the command line."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from optg.cli import main

Cli = Callable[..., tuple[int, str, str]]


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Cli:
    """Run a command in tmp_path and return its exit code, stdout and stderr."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "400")

    def call(*args: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["optg", *map(str, args)])
        try:
            main()
            code = 0
        except SystemExit as end:
            code = int(end.code or 0)
        return code, *capsys.readouterr()

    return call


@pytest.fixture(scope="session")
def trained_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train briefly on the digits, to 80 % zeros, and return the run's folder."""
    folder = tmp_path_factory.mktemp("run") / "digits"
    args = ["--epochs", "4", "--sparsity", "0.8", "--output", str(folder), "--device", "cpu"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["optg", "train", *args])
        main()
    return folder
