"""Schedules against values worked out by hand."""

import math

import pytest

from optg.core.clock import Clock
from optg.core.schedules import SCHEDULES, cosine, cubic, default_alpha, linear, logistic, sigmoid


def clock_at(progress: float, epochs: int = 100) -> Clock:
    return Clock(epochs, steps_per_epoch=10, step=round(progress * epochs * 10))


@pytest.mark.parametrize(
    "k, share",  # Eq. 15 with α = 0.5, τ = 100, worked out by hand: 1 / (1 + exp(−0.5 (k − 50)))
    [(1, 2.2898e-11), (40, 0.0066929), (48, 0.2689414), (50, 0.5), (52, 0.7310586), (60, 0.9933071), (100, 1 - 1.3888e-11)],
)
def test_equation_15(k, share):
    assert sigmoid(Clock(100, 10, step=(k - 1) * 10), 0.0, 1.0, alpha=0.5) == pytest.approx(share, rel=1e-4)


def test_alpha_is_larger_in_short_runs():
    assert [default_alpha(e) for e in (160, 100, 80, 40, 10)] == [0.5, 0.5, 0.5, 1.0, 4.0]
    assert sigmoid(Clock(10, 1, step=9), 0, 1) > 0.9999  # with α = 0.5 it would be 0.92


def test_ramps_between_start_and_end():
    for f, middle in ((linear, 0.5), (cosine, 0.5), (cubic, 0.875)):
        assert f(clock_at(0.1), 0.2, 0.6) == 0
        assert f(clock_at(0.2), 0.2, 0.6) == 0
        assert f(clock_at(0.4), 0.2, 0.6) == pytest.approx(middle)
        assert f(clock_at(0.6), 0.2, 0.6) == 1
        assert f(clock_at(0.9), 0.2, 0.6) == 1


def test_cubic_is_the_formula_of_zhu_and_gupta():
    for progress in (0.0, 0.1, 0.25, 0.5, 0.75):
        assert cubic(clock_at(progress), 0.0, 0.75) == pytest.approx(1 + (0 - 1) * (1 - progress / 0.75) ** 3)


def test_every_schedule_rises_and_stays_in_range():
    for name, schedule in SCHEDULES.items():
        values = [schedule(clock_at(i / 20), 0.1, 0.8, None) for i in range(21)]
        assert values == sorted(values), name
        assert values[0] >= 0 and values[-1] <= 1, name


def test_logistic_does_not_overflow():
    assert logistic(-1e4) == 0.0 and logistic(1e4) == 1.0 and logistic(0) == 0.5
    assert logistic(-2.0) == pytest.approx(1 / (1 + math.exp(2.0)))
