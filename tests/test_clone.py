"""`import optg` in the parent folder of a clone, which is called optg too."""

import os
import subprocess
import sys

from tests.training.runs import ROOT

PROGRAM = "import optg, optg.naming; print(optg.sparsify.__module__, optg.__file__, optg.naming.__file__)"


def test_the_parent_folder_of_a_clone_finds_the_package(tmp_path):
    """Python would take the folder of the clone for a package without code."""
    (tmp_path / "optg").symlink_to(ROOT)
    env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    for command in ([sys.executable, "-c", PROGRAM], [sys.executable, "-m", "optg", "--version"]):
        done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        package = tmp_path / "optg" / "optg"
        expected = f"optg.sparsifier {package / '__init__.py'} {package / 'naming.py'}" if command[1] == "-c" else "optg 0"
        assert done.stdout.startswith(expected)


def test_the_redirection_does_nothing_under_another_name(tmp_path):
    (tmp_path / "clone").symlink_to(ROOT)
    done = subprocess.run([sys.executable, "-c", "import clone, sys; print('optg' in sys.modules)"], cwd=tmp_path,
                          capture_output=True, text=True)  # fmt: skip
    assert done.stdout.strip() == "False"
