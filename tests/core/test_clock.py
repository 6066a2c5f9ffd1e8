"""The clock: epochs, progress and steps beyond the announced end."""

import pytest
import torch

from optg.core.clock import Clock
from optg.methods import GMP
from tests.toy import EPOCHS, STEPS, attach, batches, convnet, count_zeros, step


def test_epochs_count_from_1_and_start_every_steps_per_epoch_steps():
    clock = Clock(epochs=3, steps_per_epoch=2)
    seen = []
    for clock.step in range(7):
        seen.append((clock.epoch, clock.k, clock.at_epoch_start, clock.finished))
    assert seen == [
        (1, 1.0, True, False),
        (1, 1.5, False, False),
        (2, 2.0, True, False),
        (2, 2.5, False, False),
        (3, 3.0, True, False),
        (3, 3.5, False, False),
        (3, 4.0, False, True),
    ]
    assert clock.total == 6 and clock.progress == 1.0


@pytest.mark.parametrize("epochs, steps", [(0, 5), (5, 0), (2.5, 5), (5, -1)])
def test_impossible_lengths_are_refused(epochs, steps):
    with pytest.raises(ValueError, match="expected a whole number of at least 1"):
        Clock(epochs, steps)


def test_stepping_past_the_end_warns_once_and_keeps_the_mask():
    model = convnet()
    optimizer, sparsifier = attach(model, method=GMP(every=2))
    for batch in batches(EPOCHS * STEPS):
        step(model, optimizer, batch)
    masks = [m.clone() for m in sparsifier.masks.values()]
    with pytest.warns(UserWarning, match="optimizer step 21, but 20 were announced") as caught:
        for batch in batches(5):
            step(model, optimizer, batch)
    assert len(caught) == 1
    assert all(torch.equal(a, b) for a, b in zip(masks, sparsifier.masks.values()))
    assert count_zeros(model) == 1736
