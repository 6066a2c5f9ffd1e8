"""Every mask of every method is made in one place."""

from functools import partial

import pytest
import torch

from optg.core.passes import reference
from optg.core.structures import STRUCTURES
from optg.methods import METHODS, STR
from tests.methods.test_contract import EPOCHS, STEPS, attach
from tests.toy import batches, step


@pytest.mark.parametrize("name", [name for name, method in METHODS.items() if method.when != "never"])
def test_every_mask_goes_through_the_structure(name, monkeypatch):
    """With a structure that removes nothing, every method leaves the model dense."""
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
