"""The source of methods: short files that leave masks, kernels and sharding to the core."""

import ast
from pathlib import Path

import optg.methods

FOLDER = Path(optg.methods.__file__).parent


def test_methods_do_not_make_masks_themselves():
    """A method only asks the weights for a cut or an exchange."""
    forbidden = {"select", "write_masks", "new_masks", "overwrite", "replace", "record"}
    for file in FOLDER.glob("*.py"):
        calls = [node.func for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Call)]
        names = {call.attr for call in calls if isinstance(call, ast.Attribute)}
        assert not names & forbidden, file.name


def test_method_files_are_short_and_do_not_mention_what_the_core_handles():
    shared = {"__init__.py", "base.py", "scores.py", "soft.py"}
    files = [file for file in FOLDER.glob("*.py") if file.name not in shared]
    lengths = {file.name: len(file.read_text().splitlines()) for file in files}
    assert max(lengths.values()) <= 90 and sum(lengths.values()) / len(lengths) <= 45, lengths
    structures = "core.structures", "core.pools", "core.assignment"
    handled_by_core = "triton", "skipped", "gradscaler", "shard", "fsdp", "dtensor", *structures
    for file in files:
        assert not [word for word in handled_by_core if word in file.read_text().lower()], file.name
