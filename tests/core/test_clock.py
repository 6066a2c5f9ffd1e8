import pytest

from optg.core.clock import Clock


def test_epochs_count_from_one_and_begin_on_whole_multiples():
    clock = Clock(epochs=3, steps_per_epoch=2)
    seen = []
    for step in range(7):
        clock.step = step
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
