"""The axes of a plot: a matplotlib scale, round limits, and labelled ticks."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from optg.report.markup import axis_number

TINY = 1e-100  # anything smaller is treated as 0
OFFSET = 1e-6  # added to densities on the sparsity axis


@dataclass(frozen=True)
class Scale:
    label: str
    limits: tuple[float, float]
    ticks: dict[float, str]  # value -> label
    kind: str = "linear"  # matplotlib's name, and its options
    options: dict[str, Any] = field(default_factory=dict)

    def apply(self, axes: Axes, which: str) -> None:
        """Set up the x or y axis of matplotlib axes."""
        getattr(axes, f"set_{which}label")(self.label)
        getattr(axes, f"set_{which}scale")(self.kind, **self.options)
        getattr(axes, f"set_{which}lim")(*self.limits)
        getattr(axes, f"set_{which}ticks")(list(self.ticks), list(self.ticks.values()))
        getattr(axes, f"set_{which}ticks")([], minor=True)

    def contains(self, value: float) -> bool:
        """Return whether a value lies within the limits, up to rounding."""
        low, high = self.limits
        margin = 1e-9 * (high - low)
        return low - margin <= value <= high + margin


def linear(label: str, values: Iterable[float] = (), *, low: float | None = None, high: float | None = None) -> Scale:
    """Return a linear scale that ends at round numbers, or at the given limits."""
    values = list(values) or [0.0, 1.0]
    bottom = min(values) if low is None else low
    top = max(*values, bottom) if high is None else high
    size = max(abs(bottom), abs(top))
    if top - bottom < max(1e-9 * size, TINY):
        room = 0.01 * (size if size > TINY else 1.0)
        bottom, top = bottom - room, top + room
    marks = [float(mark) for mark in MaxNLocator(5, steps=[1, 2, 5, 10]).tick_values(bottom, top)]
    step = marks[1] - marks[0]
    bottom, top = marks[0] if low is None else low, marks[-1] if high is None else high
    digits = max(0, -math.floor(math.log10(step) + 1e-9))
    inside = [mark for mark in marks if bottom - 1e-9 * step <= mark <= top + 1e-9 * step]
    return Scale(label, (bottom, top), {v: f"{v:,.{digits}f}" if digits <= 5 else f"{v:.3g}" for v in inside})


def logarithmic(
    label: str, values: Iterable[float], write: Callable[[float], str] = axis_number, *, zero: bool = False
) -> Scale:
    """Return a logarithmic scale that ends at 1, 2 or 5 times a power of ten. With `zero`, 0 is shown below the smallest."""
    values = [value for value in values if value > TINY] or [1.0]
    bottom, top = round_to_125(min(values), -1), round_to_125(max(values), 1)
    if top <= 1.5 * bottom:
        bottom, top = round_to_125(0.9 * bottom, -1), round_to_125(1.1 * top, 1)
    decades = math.log10(top / bottom)
    factors = (1, 2, 5) if decades <= 1.4 else (1, 3) if decades <= 2.5 else (1,)
    powers = range(math.floor(math.log10(bottom)), math.ceil(math.log10(top)) + 1, math.ceil(decades / 6))
    marks = [k * 10.0**power for power in powers for k in factors]
    ticks = {mark: write(mark) for mark in marks if bottom * 0.999 <= mark <= top * 1.001}
    if not zero:
        return Scale(label, (bottom, top), ticks, "log")
    linear_part = 0.12 * decades * (1 - 1 / 10)  # matplotlib divides linscale by 1 - 1/base
    return Scale(label, (0.0, top), {0.0: "0"} | ticks, "symlog", {"linthresh": bottom, "linscale": linear_part})


def sparsities(label: str, values: Iterable[float]) -> Scale:
    """Return a scale by the logarithm of the density, so that sparsities of 98, 99 and 99.5 % are far enough apart."""
    values = list(values) or [0.0, 0.9]
    low, high = (float(depth(value)) for value in (min(values), max(values)))
    pad = 0.06 * (high - low) or 0.15
    low, high = low - pad, high + pad
    roundest_first = (0.999, 0.99, 0.9, 0.0, 0.5, 0.95, 0.98, 0.995, 0.8, 0.998, 0.9995, 0.9999, 0.99999)
    ticks: list[float] = []
    for value in roundest_first:
        if low <= depth(value) <= high and all(abs(depth(value) - depth(other)) > 0.1 * (high - low) for other in ticks):
            ticks.append(value)
    limits = float(sparsity_at(low)), float(sparsity_at(high))
    return Scale(label, limits, {v: f"{100 * v:.6g}" for v in sorted(ticks)}, "function", {"functions": (depth, sparsity_at)})


def layer_numbers(count: int) -> Scale:
    """Return a scale of whole numbers from 1 to the number of layers."""
    every = next(step for step in (1, 2, 5, 10, 20, 50, 100, 1000) if count / step <= 10 or step == 1000)
    marks = [1, *range(every, count + 1, every)] if every > 1 else list(range(1, count + 1))
    return Scale("layer", (0.5, count + 0.5), {float(mark): str(mark) for mark in marks})


def depth(sparsity: Any) -> Any:
    """Return -log10 of the density; the offset keeps a sparsity of 1 finite."""
    return -np.log10(np.maximum(1 + OFFSET - sparsity, 1e-12))


def sparsity_at(depth: Any) -> Any:
    """Inverse of `depth`."""
    return 1 + OFFSET - 10.0 ** -np.asarray(depth)


def round_to_125(value: float, direction: int = 1) -> float:
    """Round up (or down, with direction -1) to 1, 2, 5 or 10 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(value) + 1e-9)
    if direction > 0:
        return next(power * k for k in (1, 2, 5, 10) if power * k >= value * (1 - 1e-9))
    return next(power * k for k in (5, 2, 1) if power * k <= value * (1 + 1e-9))
