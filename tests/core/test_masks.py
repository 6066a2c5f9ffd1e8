"""Every mask of every method is made in one place."""

from functools import partial

import pytest
import torch

from optg.core.structures import Unstructured
from optg.methods import METHODS, STR
from tests.methods.test_contract import EPOCHS, STEPS, attach
from tests.toy import batches, step


@pytest.mark.parametrize("name", [name for name, method in METHODS.items() if method.when != "never"])
def test_every_mask_goes_through_the_structure(name, monkeypatch):
    """With a structure that removes nothing, every method leaves the model dense."""
    monkeypatch.setattr(Unstructured, "units_are_weights", False)  # so that `expand` is called
    monkeypatch.setattr(Unstructured, "expand", lambda self, units, shape, axes: torch.ones_like(units))
    monkeypatch.setitem(METHODS, "str", partial(STR, initial=-1.0))  # a threshold that would remove most weights
    model, optimizer, sparsifier = attach(name)
    for batch in batches(EPOCHS * STEPS):
        step(model, optimizer, batch)
    assert sparsifier.sparsity == 0.0
