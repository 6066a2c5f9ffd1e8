"""A new structure is one class: the drill writes one for whole kernels and trains it with every kind of method."""

import pytest
import torch

from optg.core.structures import STRUCTURES, Blocks
from tests.toy import attach, batches, convnet, step


class Kernels(Blocks):
    """Whole kernels: all positions between one input and one output channel."""

    pattern = example = "kernel"

    def tile(self, shape, axes):
        return [1 if dim in (axes.output, axes.input) else length for dim, length in enumerate(shape)]

    def reason_to_skip(self, shape, axes):
        return "" if len(shape) > 2 else "no kernel"


@pytest.mark.parametrize("method", ["optg", "rigl", "feather", "gmp", "gsm"])
def test_a_new_structure_works_with_every_kind_of_method(method, monkeypatch):
    monkeypatch.setattr("optg.core.assignment.STRUCTURES", [*STRUCTURES, Kernels])
    torch.manual_seed(0)
    model = convnet()
    optimizer, sparsifier = attach(model, method=method, structure="kernel", sparsity=0.5)
    for batch in batches(20):
        step(model, optimizer, batch)
    sparsifier.finish()
    assert sparsifier.weights.missing_zeros() == [0]
    assert list(sparsifier.masks) == ["0.weight", "4.weight"]
    removed = 0
    for mask in sparsifier.masks.values():
        kernels = mask.flatten(2)
        assert (kernels.all(2) | ~kernels.any(2)).all()
        removed += int((~kernels.any(2)).sum())
    assert removed == 36  # of 8 + 64
