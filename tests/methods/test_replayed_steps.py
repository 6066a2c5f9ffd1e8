"""Steps replayed from a CUDA graph, simulated without a GPU: hooks see a capture, and `advance` does the host's part."""

import pytest
import torch
from torch import nn

import optg
from optg.methods import METHODS
from tests.toy import batches, convnet, entropy, goal

EPOCHS, STEPS, EAGER = 4, 12, 4


def train(name: str, replayed: bool, monkeypatch) -> tuple[optg.Sparsifier, nn.Module, int]:
    torch.manual_seed(0)
    model, data, count = convnet(), batches(EPOCHS * STEPS), 0
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-3)
    counts_steps = isinstance(getattr(METHODS[name], "every", None), int)
    options = {"initial": -4.0} if name == "str" else {"every": 5} if counts_steps else {}
    method = METHODS[name](**options)
    sparsifier = optg.sparsify(
        model, optimizer, method, epochs=EPOCHS, steps_per_epoch=STEPS, loss=entropy, batches=data, **goal(name, model, 0.9)
    )
    for i, batch in enumerate(data):
        optimizer.zero_grad()
        entropy(model, batch).backward()
        if not replayed or i < EAGER or not sparsifier.capturable:
            optimizer.step()
            continue
        with monkeypatch.context() as patch:
            patch.setattr("torch.cuda.is_available", lambda: True)
            patch.setattr("torch.cuda.is_current_stream_capturing", lambda: True)
            optimizer.step()
        sparsifier.advance()
        count += 1
    return sparsifier, model, count


@pytest.mark.filterwarnings("ignore:layer collapse")
@pytest.mark.parametrize("name", [name for name, method in METHODS.items() if method.when != "never"])
def test_replayed_steps_equal_eager_steps(name, monkeypatch):
    eager, model, _ = train(name, False, monkeypatch)
    graph, other, count = train(name, True, monkeypatch)
    assert count > EPOCHS * STEPS // 2 or name in ("imp", "gsm")  # which run all steps eagerly
    assert eager.clock.step == graph.clock.step == EPOCHS * STEPS and eager.sparsity > 0
    assert all(torch.equal(mask, graph.masks[key]) for key, mask in eager.masks.items())
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), other.parameters()))
