"""Run a program as if some packages were not installed."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
BLOCK = """
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        package = name.split(".")[0]
        if package in {packages}:
            raise ModuleNotFoundError("No module named " + repr(package), name=package)

sys.meta_path.insert(0, Blocked())
"""


def run_without(packages: tuple[str, ...], program: str) -> subprocess.CompletedProcess[str]:
    """Run a Python program in a process that cannot import these packages."""
    source = BLOCK.format(packages=packages) + program
    return subprocess.run([sys.executable, "-c", source], cwd=ROOT, capture_output=True, text=True)
