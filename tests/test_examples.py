"""The examples, in a short form."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from optg.methods import METHODS

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "examples"


ALL = sorted(name for name, method in METHODS.items() if method.needs_target)
SOME = ["feather", "gmp", "optg", "rigl", "supermask"]  # one of each kind


@pytest.mark.parametrize("names", [pytest.param(ALL, marks=pytest.mark.long, id="all"), pytest.param(SOME, id="some")])
def test_methods_learn_at_90_percent_sparsity_in_ten_epochs(names: list[str]) -> None:
    command = [sys.executable, EXAMPLES / "methods.py", "--sparsity", "0.9", "--epochs", "10"]
    command += ["--methods", ",".join(names)] if names != ALL else []
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    accuracy = {name: float(value) for name, value in re.findall(r"^([\w-]+): ([\d.]+)%", printed, flags=re.MULTILINE)}
    assert sorted(accuracy) == names
    assert {name: a for name, a in accuracy.items() if a < 85} == {}


def test_an_unknown_method_is_refused_with_a_suggestion():
    wrong = subprocess.run([sys.executable, EXAMPLES / "methods.py", "--methods", "optgg"], capture_output=True, text=True)
    assert wrong.returncode == 2 and "unknown method 'optgg'; did you mean 'optg'?" in wrong.stderr


def run_example(*options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "examples" / "digits.py"), *options]
    return subprocess.run(command, capture_output=True, text=True, encoding="utf-8", timeout=300, cwd=ROOT)


def test_the_digits_example_trains_to_the_requested_sparsities(tmp_path: Path) -> None:
    done = run_example("--epochs", "2", "--output", str(tmp_path / "new"))
    assert done.returncode == 0, done.stderr
    rows = [line.split("│") for line in done.stdout.splitlines() if line.startswith("│")]
    names, accuracies, sparsities, nonzero, _, _ = zip(*([cell.strip() for cell in row[1:-1]] for row in rows))
    assert names == ("dense", "optg 90%", "optg 95%", "optg 98%")
    assert sparsities == ("0.00%", "90.00%", "95.00%", "98.00%")
    assert nonzero == ("97,568", "9,756", "4,878", "1,951")
    assert float(accuracies[0].rstrip("%")) > 80  # it learns
    assert (tmp_path / "new" / "digits.png").read_bytes().startswith(b"\x89PNG")
    assert not done.stderr


def test_the_digits_example_prunes_in_one_epoch(tmp_path: Path) -> None:
    done = run_example("--epochs", "1", "--output", str(tmp_path))
    assert done.returncode == 0 and not done.stderr
    assert all(f"{nonzero} " in done.stdout for nonzero in ("97,568", "9,756", "4,878", "1,951"))
    done = run_example("--epochs", "0", "--output", str(tmp_path))
    assert done.returncode == 2 and done.stderr.endswith("error: --epochs is 0; expected at least 1\n")
