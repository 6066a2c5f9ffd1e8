"""Adding a backend takes one module with the functions of `optg.core.passes.reference`. Here, this file is that module."""

import sys
from pathlib import Path

import pytest
import torch

import optg
from optg.core import passes
from optg.core.passes import reference
from optg.core.passes.reference import (
    accumulate,
    hyperbolic,
    keep_above,
    new_masks,
    rescale,
    scale_outputs,
    select,
    settle,
    sum_signed,
    write_masks,
)
from optg.methods import METHODS
from tests.methods.test_contract import EPOCHS, STEPS, attach
from tests.toy import batches, step

CALLS: list[str] = []

__all__ = [
    "accumulate", "hyperbolic", "keep_above", "new_masks", "rescale", "scale_outputs", "select", "settle", "sum_signed",
    "write_masks",
]  # fmt: skip


def restore(values, masks, latent):
    CALLS.append("restore")
    for value, mask, dormant in zip(values, masks, latent):
        value[~mask] = dormant[~mask]


def mask(targets, masks, share=0.0):
    CALLS.append("mask")
    for target, kept in zip(targets, masks):
        target[~kept] = target[~kept] * share if share else 0.0


def soften(*args):
    CALLS.append("soften")
    reference.soften(*args)


@pytest.fixture(autouse=True)
def register(monkeypatch):
    monkeypatch.setitem(sys.modules, "backend_of_this_test", sys.modules[__name__])
    monkeypatch.setitem(passes.BACKENDS, "cpu", "backend_of_this_test")
    CALLS.clear()


@pytest.mark.parametrize("name", [name for name, method in METHODS.items() if method.when != "never"])
def test_every_method_trains_like_with_the_reference(name, monkeypatch):
    model, optimizer, sparsifier = attach(name)
    assert sparsifier.weights.passes is sys.modules[__name__]
    monkeypatch.delitem(passes.BACKENDS, "cpu")
    other, other_optimizer, expected = attach(name)
    assert expected.weights.passes is reference
    for batch in batches(EPOCHS * STEPS):
        step(model, optimizer, batch)
        step(other, other_optimizer, batch)
    assert CALLS
    for p, q in zip(model.parameters(), other.parameters()):
        assert torch.equal(p, q)


def test_a_backend_that_cannot_be_imported_is_replaced_by_the_reference(monkeypatch):
    monkeypatch.setitem(passes.BACKENDS, "cpu", "no_such_module")
    assert passes.choose([torch.zeros(1)]) is reference


def test_tensors_on_several_devices_use_the_reference():
    assert passes.choose([torch.zeros(1), torch.zeros(1, device="meta")]) is reference


def test_only_one_file_chooses_the_backend():
    mentions = [file.name for file in Path(optg.__file__).parent.rglob("*.py") if "BACKENDS" in file.read_text()]
    assert mentions == ["__init__.py"]
