"""Deployment imports torch, numpy and safetensors only; the other packages are imported where they are used."""

import subprocess
import sys

import pytest

PROGRAM = """
import sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("PIL", "matplotlib", "rich", "tyro"):
            raise ImportError(name)

sys.meta_path.insert(0, Blocker())
import {module}
"""


@pytest.mark.parametrize("module", ["compile", "graph", "onnx", "packed", "preprocessing"])
def test_module_needs_no_package_of_the_command_line(module: str) -> None:
    program = PROGRAM.format(module=f"optg.deploy.{module}")
    child = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert child.returncode == 0, child.stderr
