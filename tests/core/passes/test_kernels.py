"""Run every fused GPU kernel on the CPU, in Triton's interpreter."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("which", ["not long", pytest.param("long", marks=pytest.mark.long)])
def test_every_kernel_passes_its_tests_in_the_interpreter(which: str) -> None:
    command = [sys.executable, "-m", "tests.core.passes.interpret_kernels", "-m", which]
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["passed"] > 0
    # Tests of CUDA graphs, streams and synchronisation cannot run here. A skipped file ("::" is missing) is never right.
    accepted = {test for test, reason in found["skipped"].items() if "::" in test and re.search("needs (a )?CUDA", reason)}
    assert found["skipped"].keys() == accepted, found["skipped"]
    assert which == "long" or found["untested"] == [], "kernels that no test runs"
