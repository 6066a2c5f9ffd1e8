"""Call commands inside the test's process, or in one of their own."""

import subprocess
import sys

import pytest

from optg import cli


def call(monkeypatch: pytest.MonkeyPatch, *args: object) -> None:
    """Run a command in this process."""
    monkeypatch.setattr(sys, "argv", ["optg", *map(str, args)])
    cli.main()


def optg(*args: str) -> subprocess.CompletedProcess[str]:
    """Run a command in a process of its own."""
    return subprocess.run([sys.executable, "-m", "optg", *args], capture_output=True, text=True)


def refusal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *args: object) -> str:
    """Run a command in this process, check that it exits with status 2 and no traceback, and return its message."""
    with pytest.raises(SystemExit) as exit:
        call(monkeypatch, *args)
    message = capsys.readouterr().err
    assert exit.value.code == 2 and "Traceback" not in message
    return message
