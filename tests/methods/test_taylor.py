"""Taylor pruning on literal numbers and against plain autograd."""

import pytest
import torch
from torch import nn

import optg
from optg.methods import Taylor
from tests.toy import batches, convnet, step


def linear_model(*weight: float, method: Taylor, sparsity: float, steps: int):
    """Return y = w·x, its sparsifier, and a function that takes a step with a given gradient; the weights never move."""
    model = nn.Linear(len(weight), 1, bias=False)
    model.weight.data.copy_(torch.tensor([weight]))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    sparsifier = optg.sparsify(model, optimizer, method, sparsity=sparsity, epochs=1, steps_per_epoch=steps)

    def step_with(*gradient: float) -> None:
        optimizer.zero_grad()
        model(torch.tensor(gradient)).backward()
        optimizer.step()

    return model, sparsifier, step_with


def test_squares_add_up_until_a_cut_and_restart_after_it():
    method = Taylor(schedule="linear", every=2, end=1.0)
    model, sparsifier, step_with = linear_model(1.0, -2.0, 3.0, 0.5, method=method, sparsity=0.5, steps=5)
    step_with(1.0, 1.0, 0.1, 2.0)  # (g·w)² = 1, 4, 0.09, 1
    step_with(-1.0, 1.0, 0.1, 0.0)  # (g·w)² = 1, 4, 0.09, 0
    # A cut at 0.5 · 2/5 = 0.2 removes one of four. Of the sums 2, 8, 0.18, 1 the third is least. (By the last step alone it
    # would be the fourth, by the square of the sum the first.)
    assert sparsifier.masks["weight"].tolist() == [[True, True, False, True]]
    step_with(3.0, 0.1, 9.0, 1.0)  # (g·w)² = 9, 0.04, 0, 0.25: a removed weight is 0
    assert sparsifier.method.state["scores"][0].tolist()[0] == pytest.approx([9.0, 0.04, 0.0, 0.25])
    step_with(0.0, 0.1, 9.0, 4.0)  # (g·w)² = 0, 0.04, 0, 4
    # The last cut removes two of four: of the sums 9, 0.08, 0, 4.25 the second and third. (If the sums had not restarted, 8.08
    # would be above 5.25 and the fourth would go.)
    assert sparsifier.masks["weight"].tolist() == [[True, False, False, True]]
    assert model.weight.tolist() == [[1.0, 0.0, 0.0, 0.5]]


def test_sums_restart_after_a_cut_even_if_the_next_step_is_skipped():
    method = Taylor(schedule="linear", every=2, end=1.0)
    _, sparsifier, step_with = linear_model(1.0, -2.0, 3.0, 0.5, method=method, sparsity=0.5, steps=6)
    step_with(1.0, 1.0, 0.1, 2.0)
    step_with(-1.0, 1.0, 0.1, 0.0)
    assert not sparsifier.capturable
    sparsifier.advance()  # like after a step that a GradScaler skipped
    assert not sparsifier.capturable
    step_with(3.0, 0.1, 9.0, 1.0)
    assert sparsifier.method.state["scores"][0].tolist()[0] == pytest.approx([9.0, 0.04, 0.0, 0.25])


def test_scores_equal_those_of_autograd_while_weights_move():
    torch.manual_seed(0)
    model = convnet().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-2)
    sparsifier = optg.sparsify(model, optimizer, Taylor(every=4), sparsity=0.9, epochs=4, steps_per_epoch=5)
    layers = [model[0].weight, model[4].weight, model[7].weight]
    sums = [torch.zeros_like(w) for w in layers]
    for t, (x, y) in enumerate(batches(20, dtype=torch.float64), 1):
        grads = torch.autograd.grad(nn.functional.cross_entropy(model(x), y), layers)
        sums = [s + (g * w.detach()) ** 2 for s, g, w in zip(sums, grads, layers)]
        step(model, optimizer, (x, y))
        if t in (4, 8, 12):  # every 4 steps, until 3/4 of training
            sums = [torch.zeros_like(w) for w in layers]
            continue
        for score, expected in zip(sparsifier.method.state["scores"], sums, strict=True):
            assert torch.allclose(score, expected, rtol=1e-10, atol=0)


def test_removed_weights_stay_removed():
    torch.manual_seed(0)
    model = convnet()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-2)
    sparsifier = optg.sparsify(model, optimizer, Taylor(every=2), sparsity=0.9, epochs=4, steps_per_epoch=5)
    removed = 0
    for batch in batches(20):
        before = {name: mask.clone() for name, mask in sparsifier.masks.items()}
        step(model, optimizer, batch)
        for name, mask in sparsifier.masks.items():
            assert not (mask & ~before[name]).any()
            assert not model.get_parameter(name)[~mask].any()
            removed += int((before[name] & ~mask).sum())
    assert removed == 1736  # ⌈0.9 · 1928⌉


def test_removed_weights_stay_removed_if_kept_ones_have_no_gradient():
    method = Taylor(schedule="linear", every=1, end=1.0)
    _, sparsifier, step_with = linear_model(1.0, 2.0, 3.0, 4.0, method=method, sparsity=0.5, steps=3)
    step_with(1.0, 1.0, 1.0, 0.1)  # (g·w)² = 1, 4, 9, 0.16
    assert sparsifier.masks["weight"].tolist() == [[True, True, True, False]]
    step_with(0.0, 0.0, 1.0, 1.0)  # (g·w)² = 0, 0, 9, 0: one more goes, the first of those with a score of 0
    assert sparsifier.masks["weight"].tolist() == [[False, True, True, False]]


def test_finish_right_after_a_cut_removes_the_smallest_weights():
    method = Taylor(schedule="linear", every=2, end=1.0)
    _, sparsifier, step_with = linear_model(1.0, -2.0, 3.0, 0.5, method=method, sparsity=0.5, steps=5)
    step_with(1.0, 1.0, 0.1, 2.0)
    step_with(-1.0, 1.0, 0.1, 0.0)  # sums 2, 8, 0.18, 1: the third goes
    with pytest.warns(UserWarning, match="short of 0.5"):
        sparsifier.finish()  # removes two of four: also the fourth, which has the smallest magnitude
    assert sparsifier.masks["weight"].tolist() == [[True, True, False, False]]
