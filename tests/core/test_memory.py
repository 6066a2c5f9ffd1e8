"""What stays in memory: nothing that training no longer needs."""

import gc
import weakref

import pytest
import torch

import optg
from optg.methods import METHODS
from tests.toy import batches, convnet, entropy, goal, step


def start(name, steps=12):
    model = convnet()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    options = {"every": 2} if hasattr(METHODS[name], "every") else {"fraction": 0.6} if name == "imp" else {}
    sparsifier = optg.sparsify(
        model, optimizer, METHODS[name](**options), steps=steps, loss=entropy, batches=batches(4), **goal(name, model, 0.8)
    )
    return model, optimizer, sparsifier


def train(model, optimizer):
    for batch in batches(12):
        step(model, optimizer, batch)


def floats_alive():
    """Return the number of floats in all tensors that Python knows."""
    gc.collect()
    seen = {}
    for thing in gc.get_objects():
        if type(thing) in (torch.Tensor, torch.nn.Parameter) and thing.is_floating_point():
            seen[thing.untyped_storage().data_ptr()] = thing.untyped_storage().nbytes() // 4
    return sum(seen.values())


@pytest.mark.parametrize("name", METHODS)
def test_after_finish_only_the_model_and_its_optimizer_are_left(name):
    before = floats_alive()
    model, optimizer, sparsifier = start(name)
    train(model, optimizer)
    sparsifier.finish()
    optimizer.zero_grad()
    state = sum(t.numel() for s in optimizer.state.values() for t in s.values() if isinstance(t, torch.Tensor))
    own = sum(t.numel() for t in model.state_dict().values()) + state
    assert floats_alive() - before <= own + 200  # learning rates, thresholds per layer


def test_dense_training_keeps_no_copies():
    before = floats_alive()
    model, *_others = start("dense")
    size = sum(p.numel() for p in model.parameters())
    assert floats_alive() - before < 1.2 * size


@pytest.mark.parametrize("name", ["feather", "str", "st3", "optg", "gmp"])
def test_a_finished_sparsifier_is_freed_without_the_garbage_collector(name):
    model, optimizer, sparsifier = start(name)
    train(model, optimizer)
    sparsifier.finish()
    watched = weakref.ref(sparsifier.weights.masks[0])
    gc.collect()
    gc.disable()
    try:
        del sparsifier, model, optimizer
        assert watched() is None
    finally:
        gc.enable()
