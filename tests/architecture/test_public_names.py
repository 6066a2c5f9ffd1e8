"""Public names, signatures, options and flags change only on purpose: public.txt lists them."""

import subprocess
import sys
from difflib import unified_diff
from pathlib import Path

LISTED = Path(__file__).with_name("public.txt")
ROOT = Path(__file__).parents[2]
UPDATE = "python -m tests.architecture.public > tests/architecture/public.txt"


def test_the_public_interface_is_as_listed() -> None:
    done = subprocess.run([sys.executable, "-m", "tests.architecture.public"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    listed, found = LISTED.read_text().splitlines(), done.stdout.splitlines()
    changes = "\n".join(unified_diff(listed, found, "public.txt", "code", lineterm="", n=0))
    assert not changes, f"The public interface changed. If this is intended, run\n  {UPDATE}\nand commit the file.\n{changes}"
