"""The results of a benchmark, and their summary in words and in JSON."""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from optg.files import atomic_write


@dataclass
class Timing:
    """One engine at one batch size and number of threads."""

    engine: str
    threads: int
    batch: int
    milliseconds: float  # per call: the median
    low: float  # lower quartile
    high: float  # upper quartile
    calls: int
    difference: float  # largest difference from torch's output, relative to the largest output

    @property
    def images_per_second(self) -> float:
        return 1000 * self.batch / self.milliseconds


@dataclass
class Benchmark:
    subject: dict[str, Any]  # name, size, non-zeros, FLOPs
    hardware: str
    versions: dict[str, str]
    timings: list[Timing] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def subject_line(benchmark: Benchmark) -> str:
    about = benchmark.subject
    return (
        f"{about['name']}: {about['packed_bytes'] / 1e6:,.3f} MB packed, {about['packed_bytes'] / about['dense_bytes']:.2%} of "
        f"{about['dense_bytes'] / 1e6:,.3f} MB dense; {about['nonzero']:,} of {about['parameters']:,} parameters; "
        f"{about['flops'] / 1e6:,.2f} of {about['dense_flops'] / 1e6:,.2f} MFLOPs"
    )


def by_setting(benchmark: Benchmark) -> dict[tuple[int, int], list[Timing]]:
    """Group the timings by (batch, threads)."""
    settings: dict[tuple[int, int], list[Timing]] = {}
    for timing in benchmark.timings:
        settings.setdefault((timing.batch, timing.threads), []).append(timing)
    return settings


def setting_name(batch: int, threads: int) -> str:
    return f"batch {batch}, {threads} thread{'s' if threads > 1 else ''}"


PRECISIONS = {"float32": "optg", "int8": "optg int8"}  # engines of optg, by what they are compared with


def precision_of(engine: str) -> str:
    return next((name for name in ("bf16", "int8") if name in engine), "float32")


def best_other(timings: list[Timing], precision: str = "float32") -> Timing | None:
    """Return the fastest engine of this precision other than optg's."""
    others = (t for t in timings if precision_of(t.engine) == precision and t.engine != PRECISIONS[precision])
    return min(others, key=lambda t: t.milliseconds, default=None)


def speedup_lines(benchmark: Benchmark) -> Iterator[str]:
    """Compare optg with the best other engine of the same precision, one line per setting and precision."""
    for (batch, threads), timings in by_setting(benchmark).items():
        for precision, name in PRECISIONS.items():
            ours, other = next((t for t in timings if t.engine == name), None), best_other(timings, precision)
            if ours and other:
                factor = other.milliseconds / ours.milliseconds
                setting = setting_name(batch, threads)
                yield f"{setting}: {name} is {factor:.2f} × as fast as {other.engine}, the best other engine in {precision}"


def write_json(benchmark: Benchmark, path: Path) -> None:
    timings = [{**asdict(t), "images_per_second": t.images_per_second} for t in benchmark.timings]
    with atomic_write(path) as partial:
        partial.write_text(json.dumps({**asdict(benchmark), "timings": timings}, indent=2) + "\n")
