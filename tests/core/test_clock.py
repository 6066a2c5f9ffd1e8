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


@pytest.mark.parametrize("steps, epochs", [(10, 3), (7, 7), (250, None), (1, None), (99, 10), (1000, 7)])
def test_epochs_of_a_length_in_steps_end_at_rounded_fractions(steps, epochs):
    clock = Clock.of(epochs, None, steps)
    count = epochs or min(100, steps)
    ends = [round(k * steps / count) for k in range(count + 1)]
    assert clock.total == steps and clock.epochs == count
    for step in range(steps + 1):
        now = clock.at(step)
        done = max(k for k in range(count + 1) if ends[k] <= step)
        assert now.epochs_before(step) == done
        assert now.epoch == min(done + 1, count)
        assert now.between_epochs == (step in ends) and now.at_epoch_start == (step in ends and step < steps)
        assert now.k == pytest.approx(1 + step * count / steps)
    assert clock.at(steps).finished


def test_steps_that_divide_evenly_are_the_same_as_epochs():
    for step in range(41):
        a, b = Clock(10, 4, step), Clock.of(10, None, 40).at(step)
        for name in ("total", "epoch", "k", "progress", "at_epoch_start", "finished", "between_epochs"):
            assert getattr(a, name) == getattr(b, name), (step, name)


@pytest.mark.parametrize(
    "given", [(None, None, None), (3, None, None), (None, 3, None), (3, 4, 12), (None, 4, 12), (None, None, 0)]
)
def test_an_unclear_length_is_refused(given):
    with pytest.raises(ValueError, match=r"length of training is not clear|expected a whole number"):
        Clock.of(*given)


def test_more_epochs_than_steps_are_refused():
    with pytest.raises(ValueError, match="expected at least one step per epoch"):
        Clock.of(5, None, 3)
