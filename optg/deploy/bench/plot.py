"""The results of a benchmark as bar charts."""

import textwrap
from pathlib import Path
from typing import Any

from optg.deploy.bench.results import PRECISIONS, Benchmark, Timing, best_other, by_setting, setting_name, subject_line
from optg.files import atomic_write

OPTG_COLOUR, OTHER_COLOUR = "#ba266d", "#8a949e"


def check_plot_suffix(path: Path) -> None:
    if path.suffix not in (".png", ".svg", ".pdf"):
        raise ValueError(f"--plot {path} should end in .png, .svg or .pdf")


def plot_benchmark(benchmark: Benchmark, path: Path) -> None:
    """Draw images per second of each engine, one panel per setting. Whiskers show the quartiles."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot as plt

    settings = by_setting(benchmark)
    batches, threads = sorted({b for b, _ in settings}), sorted({t for _, t in settings})
    engines = list(dict.fromkeys(t.engine for t in benchmark.timings))
    figure, axes = plt.subplots(
        len(batches),
        len(threads),
        figsize=(1 + 4.2 * len(threads), 0.9 + (0.5 + 0.32 * len(engines)) * len(batches)),
        squeeze=False,
        layout="constrained",
    )
    for (batch, count), timings in settings.items():
        axis = axes[batches.index(batch)][threads.index(count)]
        axis.set_title(setting_name(batch, count), loc="left", fontsize=10)
        draw_panel(axis, timings, engines)
    for axis in axes[-1]:
        axis.set_xlabel("images per second")
    caption = f"{benchmark.hardware}; ×: speed relative to the best other engine in float32"
    title = [*textwrap.wrap(subject_line(benchmark), 65 * len(threads)), caption]
    figure.suptitle("\n".join(title), fontsize=8, x=0.01, ha="left")
    with atomic_write(path) as partial:
        figure.savefig(partial, format=path.suffix[1:], dpi=150)
    plt.close(figure)


def draw_panel(axis: Any, timings: list[Timing], engines: list[str]) -> None:
    """Draw one bar per engine; every panel has a row for each of `engines`."""
    from matplotlib.ticker import MaxNLocator, StrMethodFormatter

    other = best_other(timings)
    for t in timings:
        row, speed = engines.index(t.engine), t.images_per_second
        slowest, fastest = 1000 * t.batch / t.high, 1000 * t.batch / t.low
        colour = OPTG_COLOUR if t.engine in PRECISIONS.values() else OTHER_COLOUR
        whiskers = {"xerr": [[speed - slowest], [fastest - speed]], "error_kw": {"elinewidth": 1, "capsize": 2}}
        axis.barh(row, speed, color=colour, height=0.7, **whiskers)
        factor = f"  {other.milliseconds / t.milliseconds:.2f} ×" if t.engine == "optg" and other else ""
        axis.annotate(f"{speed:,.0f}{factor}", (fastest, row), (4, 0), textcoords="offset points", va="center")
    axis.set_yticks(range(len(engines)), engines)
    axis.invert_yaxis()
    axis.set_xlim(0, 1.4 * max(1000 * t.batch / t.low for t in timings))
    axis.xaxis.set_major_locator(MaxNLocator(4))
    axis.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    axis.spines[["top", "right"]].set_visible(False)
