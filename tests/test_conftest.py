"""--strict-skips fails a run where a test is skipped for a reason that is not on the list."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
SKIPPED_TEST = "import pytest\ndef test_it():\n    pytest.skip({!r})\n"
SKIPPED_FILE = "import pytest\npytest.skip({!r}, allow_module_level=True)\n"


def test_only_listed_reasons_are_accepted(tmp_path: Path) -> None:
    for folder, reason in (("listed", "needs a CUDA GPU"), ("unlisted", "too slow")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / f"test_{folder}_one.py").write_text(SKIPPED_TEST.format(reason))
        (tmp_path / folder / f"test_{folder}_file.py").write_text(SKIPPED_FILE.format(reason))
    (tmp_path / "listed" / "test_passes.py").write_text("def test_it():\n    pass\n")
    command = [sys.executable, "-m", "pytest", "-p", "tests.conftest", "--rootdir", tmp_path, "--strict-skips"]

    passed = subprocess.run([*command, tmp_path / "listed"], cwd=ROOT, capture_output=True, text=True)
    assert passed.returncode == 0 and "unexpected skips" not in passed.stdout

    failed = subprocess.run([*command, "-n", "1", tmp_path], cwd=ROOT, capture_output=True, text=True)
    assert failed.returncode == 1
    summary = failed.stdout.partition("unexpected skips")[2]
    assert summary.count("too slow") == 2 and "test_unlisted_one.py" in summary and "test_unlisted_file.py" in summary
    assert "test_listed" not in summary
