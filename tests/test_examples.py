"""`examples/methods.py`: every method learns at 90 % sparsity in ten epochs."""

import re
import subprocess
import sys
from pathlib import Path

from optg.methods import METHODS

EXAMPLES = Path(__file__).parent.parent / "examples"


def test_every_method_learns() -> None:
    command = [sys.executable, EXAMPLES / "methods.py", "--sparsity", "0.9", "--epochs", "10"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    accuracy = {name: float(value) for name, value in re.findall(r"^([\w-]+): ([\d.]+)%", printed, flags=re.MULTILINE)}
    assert set(accuracy) == set(METHODS)
    assert {name: a for name, a in accuracy.items() if a < 85} == {}


def test_an_unknown_method_is_refused_with_a_suggestion() -> None:
    wrong = subprocess.run([sys.executable, EXAMPLES / "methods.py", "--methods", "optgg"], capture_output=True, text=True)
    assert wrong.returncode == 2 and "unknown method 'optgg'; did you mean 'optg'?" in wrong.stderr
