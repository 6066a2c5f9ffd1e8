"""benchmarks/gpu.sh: every command has valid arguments, and a failing part does not stop the others."""

import argparse
import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any, NoReturn

import pytest

ROOT = Path(__file__).parents[1]


def commands(tmp_path: Path, *parts: str, status: int = 0) -> tuple[list[list[str]], subprocess.CompletedProcess[str]]:
    """Run the script with a Python that only prints its arguments, and return them."""
    stub = tmp_path / "python"
    stub.write_text(f"#!/bin/sh\nprintf 'call\\n' >&2\nprintf '%s\\n' \"$@\" >&2\nexit {status}\n")
    stub.chmod(0o755)
    environment = {**os.environ, "PYTHON": str(stub)}
    done = subprocess.run(["benchmarks/gpu.sh", "DATA", *parts], cwd=ROOT, env=environment, capture_output=True, text=True)
    return [call.splitlines() for call in done.stderr.split("failed:")[0].split("call\n")[1:]], done


def test_each_command_has_valid_arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def parse(self: argparse.ArgumentParser, *args: Any) -> NoReturn:
        raise StopIteration(real(self, *args))

    real = argparse.ArgumentParser.parse_args
    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse)
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    found, done = commands(tmp_path)
    assert done.returncode == 0 and len(found) == 12
    for command in found:
        monkeypatch.setattr(sys, "argv", command)
        with pytest.raises(StopIteration):
            runpy.run_path(str(ROOT / command[0]), run_name="__main__")


def test_a_failing_part_does_not_stop_the_others(tmp_path: Path) -> None:
    found, done = commands(tmp_path, "two-four", "shrunk", status=3)
    assert [command[0] for command in found] == ["benchmarks/semi_structured.py", "benchmarks/shrunk.py"]
    assert done.returncode == 1 and done.stderr.endswith("failed: two-four shrunk\n")
    assert commands(tmp_path, "no-such-part")[1].stderr == "unknown part no-such-part\nfailed: no-such-part\n"
