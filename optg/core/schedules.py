"""Schedules: the share of the target sparsity as a function of the clock, 0 at `start` of training and 1 at `end`.

To add one, write a function and list it in SCHEDULES. Only the sigmoid uses `alpha`.
"""

import math
from collections.abc import Callable

from optg.core.clock import Clock


def logistic(x: float) -> float:
    """Return 1 / (1 + e^−x) without overflow on either side."""
    return 1 / (1 + math.exp(-x)) if x >= 0 else math.exp(x) / (1 + math.exp(x))


def default_alpha(epochs: int) -> float:
    """Return the paper's 0.5, or more below 80 epochs, where 0.5 would end short of the target (10 epochs: at 0.92 P)."""
    return max(0.5, 40 / epochs)


def ramp(clock: Clock, start: float, end: float) -> float:
    """Return the progress between two points of training, clipped to [0, 1]."""
    return min(max((clock.progress - start) / (end - start), 0.0), 1.0) if end > start else float(clock.progress >= end)


def constant(clock: Clock, start: float, end: float, alpha: float | None = None) -> float:
    return 1.0


def linear(clock: Clock, start: float, end: float, alpha: float | None = None) -> float:
    return ramp(clock, start, end)


def cosine(clock: Clock, start: float, end: float, alpha: float | None = None) -> float:
    return (1 - math.cos(math.pi * ramp(clock, start, end))) / 2


def cubic(clock: Clock, start: float, end: float, alpha: float | None = None) -> float:
    """Zhu & Gupta, "To prune, or not to prune" (2017): fast at first, slow at the end."""
    return 1 - (1 - ramp(clock, start, end)) ** 3


def sigmoid(clock: Clock, start: float, end: float, alpha: float | None = None) -> float:
    """OptG, Eq. 15: 1 / (1 + exp(−α(k − τ/2))). Centred on the middle of training, whatever `start` and `end` are."""
    return logistic((alpha or default_alpha(clock.epochs)) * (clock.k - clock.epochs / 2))


Schedule = Callable[[Clock, float, float, float | None], float]
SCHEDULES: dict[str, Schedule] = {f.__name__: f for f in (constant, linear, cosine, cubic, sigmoid)}
