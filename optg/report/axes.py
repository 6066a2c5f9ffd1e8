"""Axes: where a value stands between 0 and 1, and which values are written beside it."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from optg.report.markup import brief

TINY = 1e-290  # as good as 0: a fifth of it still has a logarithm


@dataclass(frozen=True)
class Axis:
    label: str
    place: Callable[[float], float]
    ticks: list[tuple[float, str]]  # a place, and what is written there


def linear(label: str, values: Iterable[float], *, low: float | None = None, high: float | None = None) -> Axis:
    """An axis whose ends are round numbers, unless they are given."""
    values = list(values) or [0.0, 1.0]
    bottom, top = min(values) if low is None else low, max(values) if high is None else high
    size = max(abs(bottom), abs(top))
    if top - bottom < max(1e-9 * size, TINY):
        room = 0.01 * (size if size > TINY else 1.0)
        bottom, top = bottom - room, top + room
    step = round_up((top - bottom) / 5)
    bottom = math.floor(bottom / step + 1e-9) * step if low is None else low
    top = math.ceil(top / step - 1e-9) * step if high is None else high
    first, digits = math.ceil(bottom / step - 1e-9), max(0, -math.floor(math.log10(step) + 1e-9))
    marks = [i * step for i in range(first, first + 12) if i * step <= top + 1e-9 * step]

    def place(value: float) -> float:
        return (value - bottom) / (top - bottom)

    return Axis(label, place, [(place(mark), f"{mark:,.{digits}f}" if digits <= 5 else f"{mark:.3g}") for mark in marks])


def logarithmic(label: str, values: Iterable[float], write: Callable[[float], str] = brief, *, zero: bool = False) -> Axis:
    """An axis whose ends are 1, 2 or 5 times a power of ten; 0, where there may be some, stands at its foot."""
    values = [value for value in values if value > 0] or [1.0]
    bottom, top = round_up(min(values), -1), round_up(max(values), 1)
    if top <= 1.5 * bottom:
        bottom, top = round_up(0.9 * bottom, -1), round_up(1.1 * top, 1)
    decades = math.log10(top / bottom)
    foot = math.log10(bottom) - 0.12 * zero * decades
    first, last = math.floor(math.log10(bottom)), math.ceil(math.log10(top))
    factors = (1, 2, 5) if decades <= 1.4 else (1, 3) if decades <= 2.5 else (1,)
    every = math.ceil(decades / 6)
    marks = [k * 10.0**power for power in range(first, last + 1, every) for k in factors]

    def place(value: float) -> float:
        return (math.log10(value) - foot) / (math.log10(top) - foot) if value > 0 else 0.0

    ticks = [(place(mark), write(mark)) for mark in marks if bottom * 0.999 <= mark <= top * 1.001]
    return Axis(label, place, [(0.0, "0")] * zero + ticks)


def sparsities(label: str, values: Iterable[float]) -> Axis:
    """Sparsity by the logarithm of what is kept, so that 98, 99 and 99.5 % stand apart."""
    values = list(values) or [0.0, 0.9]
    low, high = depth(min(values)), depth(max(values))
    pad = 0.06 * (high - low) or 0.15
    low, high = low - pad, high + pad

    def place(value: float) -> float:
        return (depth(value) - low) / (high - low)

    known = (0.999, 0.99, 0.9, 0.0, 0.5, 0.95, 0.98, 0.995, 0.8, 0.998, 0.9995, 0.9999, 0.99999)  # the roundest first
    ticks: list[tuple[float, str]] = []
    for value in known:
        if 0 <= place(value) <= 1 and all(abs(place(value) - other) > 0.1 for other, _ in ticks):
            ticks.append((place(value), f"{100 * value:.6g}"))
    return Axis(label, place, sorted(ticks))


def depth(sparsity: float) -> float:
    return -math.log10(max(1 - sparsity, 1e-6))


def round_up(value: float, way: int = 1) -> float:
    """The next of 1, 2, 5, 10, ... times a power of ten; with way −1 the one before."""
    power = 10.0 ** math.floor(math.log10(value) + 1e-9)
    if way > 0:
        return next(power * k for k in (1, 2, 5, 10) if power * k >= value * (1 - 1e-9))
    return next(power * k for k in (5, 2, 1) if power * k <= value * (1 + 1e-9))
