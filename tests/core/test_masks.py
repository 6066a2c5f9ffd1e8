"""Every mask of every method is made in one place."""

import ast
from functools import partial
from pathlib import Path

import pytest
import torch

import optg
from optg.core.passes import reference
from optg.core.structures import STRUCTURES
from optg.methods import METHODS, STR
from tests.methods.test_contract import EPOCHS, STEPS, attach
from tests.toy import batches, step

FOLDER = Path(optg.__file__).parent


@pytest.mark.parametrize("name", [name for name, method in METHODS.items() if method.when != "never"])
def test_every_mask_goes_through_the_structure(name, monkeypatch):
    """A structure that keeps everything leaves the model dense, whatever the method does."""
    unstructured = type(STRUCTURES["unstructured"])

    def keep_all(self, passes, masks, *_):
        return torch.stack([reference.overwrite(mask, torch.ones_like(mask)) for mask in masks])

    monkeypatch.setattr(unstructured, "write", keep_all)
    monkeypatch.setattr(unstructured, "keep_above", keep_all)
    monkeypatch.setattr(unstructured, "new", lambda self, passes, units, *_: [torch.ones_like(u).bool() for u in units])
    monkeypatch.setitem(METHODS, "str", partial(STR, initial=-1.0))  # a threshold that would remove most weights
    model, optimizer, sparsifier = attach(name)
    for batch in batches(EPOCHS * STEPS):
        step(model, optimizer, batch)
    assert sparsifier.sparsity == 0.0


def test_methods_do_not_make_masks_themselves():
    """No method calls a selection or overwrites a mask: they only ask the weights for a cut or an exchange."""
    forbidden = {"select", "write_masks", "new_masks", "overwrite", "replace", "record"}
    for file in (FOLDER / "methods").glob("*.py"):
        calls = [node.func for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Call)]
        names = {call.attr for call in calls if isinstance(call, ast.Attribute)}
        assert not names & forbidden, file.name


def test_method_files_are_short_and_speak_of_methods_only():
    shared = {"__init__.py", "base.py", "scores.py"}
    files = [file for file in (FOLDER / "methods").glob("*.py") if file.name not in shared]
    lengths = {file.name: len(file.read_text().splitlines()) for file in files}
    assert max(lengths.values()) <= 90 and sum(lengths.values()) / len(lengths) <= 45, lengths
    elsewhere = "triton", "skipped", "gradscaler", "shard", "fsdp", "dtensor"
    for file in files:
        assert not [word for word in elsewhere if word in file.read_text().lower()], file.name


def test_the_backend_is_chosen_in_one_place():
    asking = [file.name for file in FOLDER.rglob("*.py") if "BACKENDS" in file.read_text()]
    assert asking == ["__init__.py"]


@pytest.mark.parametrize(
    ("module", "axes"),
    [
        (torch.nn.Linear(3, 5), (0, 1, 1)),
        (torch.nn.Conv2d(3, 5, 3), (0, 1, 1)),
        (torch.nn.ConvTranspose2d(3, 5, 3), (1, 0, 1)),
        (torch.nn.Bilinear(2, 3, 4), (0, 1, 1)),
    ],
)
def test_layers_know_their_axes(module, axes):
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    [layer] = optg.sparsify(module, optimizer, "gmp", sparsity=0.5, epochs=2, steps_per_epoch=2).layers()
    assert tuple(layer.axes) == axes and layer.weights == layer.kept and layer.density == 1.0


def test_stacked_projections_have_three_parts():
    attention = torch.nn.MultiheadAttention(8, 2)
    optimizer = torch.optim.SGD(attention.parameters(), lr=0.1)
    layers = optg.sparsify(attention, optimizer, "gmp", sparsity=0.5, epochs=2, steps_per_epoch=2).layers()
    assert {layer.name: layer.axes.parts for layer in layers} == {"in_proj_weight": 3, "out_proj.weight": 1}
