"""What a benchmark measured, as a table, a figure and JSON."""

import json
import textwrap
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

from optg.files import atomic_write


@dataclass
class Timing:
    """One engine in one setting."""

    engine: str
    threads: int
    batch: int
    milliseconds: float  # a call: the median
    low: float  # the quartiles
    high: float
    calls: int
    difference: float  # the largest from torch's output, relative to its largest

    @property
    def images_per_second(self) -> float:
        return 1000 * self.batch / self.milliseconds


@dataclass
class Report:
    subject: dict[str, Any]  # name, size, non-zeros, FLOPs
    hardware: str
    versions: dict[str, str]
    timings: list[Timing] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def summary(report: Report) -> str:
    about = report.subject
    return (
        f"{about['name']}: {about['packed_bytes'] / 1e6:,.3f} MB packed, {about['packed_bytes'] / about['dense_bytes']:.2%} of "
        f"{about['dense_bytes'] / 1e6:,.3f} MB dense; {about['nonzero']:,} of {about['parameters']:,} parameters; "
        f"{about['flops'] / 1e6:,.2f} of {about['dense_flops'] / 1e6:,.2f} MFLOPs"
    )


def by_setting(report: Report) -> dict[tuple[int, int], list[Timing]]:
    """The timings of each (batch, threads)."""
    settings: dict[tuple[int, int], list[Timing]] = {}
    for timing in report.timings:
        settings.setdefault((timing.batch, timing.threads), []).append(timing)
    return settings


def best_other(timings: list[Timing]) -> Timing | None:
    """The fastest engine but optg that computes in float32."""
    return min((t for t in timings if t.engine not in ("optg", "openvino bf16")), key=lambda t: t.milliseconds, default=None)


def setting(batch: int, threads: int) -> str:
    return f"batch {batch}, {threads} thread{'s' if threads > 1 else ''}"


def digits(milliseconds: float) -> str:
    return f"{milliseconds:,.{3 if milliseconds < 10 else 2 if milliseconds < 100 else 0}f}"


def table(report: Report) -> Table:
    texts = {"title": escape(summary(report)), "caption": escape(report.hardware)}
    made = Table(**texts, title_justify="left", caption_justify="left", box=SIMPLE_HEAD, show_edge=False)  # type: ignore[arg-type]
    made.add_column("engine", no_wrap=True)
    for column in ("ms", "quartiles", "images/s", "× torch", "error"):
        made.add_column(column, justify="right", no_wrap=True)
    for (batch, threads), timings in by_setting(report).items():
        made.add_row(setting(batch, threads), style="italic")
        torch_time = next((t.milliseconds for t in timings if t.engine == "torch"), None)
        for t in timings:
            made.add_row(
                f"  {t.engine}",
                digits(t.milliseconds),
                f"{digits(t.low)}–{digits(t.high)}",
                f"{t.images_per_second:,.0f}",
                f"{torch_time / t.milliseconds:.2f}" if torch_time else "",
                f"{t.difference:.0e}",
                style="bold" if t.engine == "optg" else "",
            )
        made.add_section()
    return made


def verdicts(report: Report) -> Iterator[str]:
    """optg against the best of the others in float32, in each setting."""
    for (batch, threads), timings in by_setting(report).items():
        ours, other = next((t for t in timings if t.engine == "optg"), None), best_other(timings)
        if ours and other:
            factor = other.milliseconds / ours.milliseconds
            yield f"{setting(batch, threads)}: optg is {factor:.2f} × as fast as {other.engine}, the best other in float32"


def write_json(report: Report, path: Path) -> None:
    timings = [{**asdict(t), "images_per_second": t.images_per_second} for t in report.timings]
    with atomic_write(path) as partial:
        partial.write_text(json.dumps({**asdict(report), "timings": timings}, indent=2) + "\n")


def draw(report: Report, path: Path) -> None:
    """Images a second of each engine, a panel for each setting; whiskers are the quartiles."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot as plt
    from matplotlib.ticker import MaxNLocator, StrMethodFormatter

    settings = by_setting(report)
    batches, threads = sorted({b for b, _ in settings}), sorted({t for _, t in settings})
    engines = list(dict.fromkeys(t.engine for t in report.timings))
    figure, axes = plt.subplots(
        len(batches),
        len(threads),
        figsize=(1 + 4.2 * len(threads), 0.9 + (0.5 + 0.32 * len(engines)) * len(batches)),
        squeeze=False,
        layout="constrained",
    )
    for (batch, count), timings in settings.items():
        axis, other = axes[batches.index(batch)][threads.index(count)], best_other(timings)
        for t in timings:
            row, speed = engines.index(t.engine), t.images_per_second
            spread = [[speed - 1000 * batch / t.high], [1000 * batch / t.low - speed]]
            colour = "#ba266d" if t.engine == "optg" else "#8a949e"
            axis.barh(row, speed, xerr=spread, color=colour, height=0.7, error_kw={"elinewidth": 1, "capsize": 2})
            factor = f"  {other.milliseconds / t.milliseconds:.2f} ×" if t.engine == "optg" and other else ""
            axis.annotate(f"{speed:,.0f}{factor}", (1000 * batch / t.low, row), (4, 0), textcoords="offset points", va="center")
        axis.set_yticks(range(len(engines)), engines)
        axis.invert_yaxis()
        axis.set_title(setting(batch, count), loc="left", fontsize=10)
        axis.set_xlim(0, 1.4 * max(1000 * batch / t.low for t in timings))
        axis.xaxis.set_major_locator(MaxNLocator(4))
        axis.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
        axis.spines[["top", "right"]].set_visible(False)
    for axis in axes[-1]:
        axis.set_xlabel("images a second")
    title = [*textwrap.wrap(summary(report), 65 * len(threads)), f"{report.hardware}; ×: against the best other in f32"]
    figure.suptitle("\n".join(title), fontsize=8, x=0.01, ha="left")
    with atomic_write(path) as partial:
        figure.savefig(partial, format=path.suffix[1:], dpi=150)
    plt.close(figure)
