"""Steps with a closure, autocast or a GradScaler."""

import copy

import pytest
import torch
from torch import nn

from tests.toy import EPOCHS, STEPS, attach, batches, convnet, entropy, step


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def test_a_closure_is_evaluated_on_effective_weights():
    model = convnet()
    optimizer, sparsifier = attach(model)
    model2 = copy.deepcopy(model)
    optimizer2, _ = attach(model2)
    for style, (x, y) in enumerate(batches(EPOCHS * STEPS)):

        def closure(x=x, y=y):
            assert torch.is_grad_enabled()
            for value, mask in zip(sparsifier.weights.values, sparsifier.weights.masks):
                assert not value[~mask].any()
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            return loss

        loss = optimizer.step(closure) if style % 2 else optimizer.step(closure=closure)
        assert loss.item() == step(model2, optimizer2, (x, y))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), model2.parameters()))


def test_an_optimizer_that_moves_weights_before_it_calls_the_closure_is_refused():
    class Sharp(torch.optim.SGD):
        """Computes the gradient at moved weights, as SAM does."""

        def step(self, closure):
            with torch.no_grad():
                for p in model.parameters():
                    p.add_(0.01 * p.grad)
            loss = closure()
            super().step()
            return loss

    model = convnet()
    optimizer, _ = attach(model, Sharp(model.parameters(), lr=0.1))
    batch = batches(1)[0]
    entropy(model, batch).backward()
    with pytest.raises(RuntimeError, match="Sharp evaluates the model again after moving its weights"):
        optimizer.step(lambda: entropy(model, batch))


def test_bfloat16_autocast():
    model = convnet()
    optimizer, sparsifier = attach(model)
    for x, y in batches(EPOCHS * STEPS):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
    assert sparsifier.sparsity >= 0.9


@pytest.mark.parametrize("unscale_first", [False, True])
@pytest.mark.parametrize("fused", [False, True])
def test_a_grad_scaler_only_skips_steps(fused, unscale_first):
    data = batches(EPOCHS * STEPS)
    model = convnet()
    plain = copy.deepcopy(model)
    optimizer, sparsifier = attach(model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, fused=fused))
    plain_optimizer, plain_sparsifier = attach(plain, torch.optim.SGD(plain.parameters(), lr=0.05, momentum=0.9, fused=fused))
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)  # a power of two, so that scaling and unscaling are exact
    for i, (x, y) in enumerate(data):
        broken = i == 7
        before = copy.deepcopy(sparsifier.method.state)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        scaler.scale(loss * torch.inf if broken else loss).backward()
        if unscale_first:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        if broken:
            assert all(torch.equal(a, b) for k in before for a, b in zip(before[k], sparsifier.method.state[k]))
            if not fused:  # it was not called; a fused optimizer was, and its step counts
                sparsifier.advance()
            plain_sparsifier.advance()
            model.load_state_dict(plain.state_dict())  # batch norm has averaged in the broken batch
        else:
            step(plain, plain_optimizer, (x, y))
    assert sparsifier.clock.step == plain_sparsifier.clock.step == EPOCHS * STEPS
    for a, b in zip(model.parameters(), plain.parameters()):
        assert torch.allclose(a, b, atol=1e-6)
    for a, b in zip(sparsifier.masks.values(), plain_sparsifier.masks.values()):
        assert torch.equal(a, b)
