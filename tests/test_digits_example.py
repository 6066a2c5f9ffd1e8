"""examples/digits.py trains dense and sparse models on the bundled digits."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def run_example(*options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "examples" / "digits.py"), *options]
    return subprocess.run(command, capture_output=True, text=True, encoding="utf-8", timeout=300, cwd=ROOT)


def test_it_prints_the_table_and_draws_the_figure(tmp_path: Path) -> None:
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


def test_it_says_how_many_epochs_it_needs(tmp_path: Path) -> None:
    done = run_example("--epochs", "1", "--output", str(tmp_path))
    assert done.returncode == 2
    assert "at least 2" in done.stderr.splitlines()[-1]
