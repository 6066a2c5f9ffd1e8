"""The results of a benchmark as a table for the terminal."""

from typing import TYPE_CHECKING

from optg.deploy.bench.results import Benchmark, by_setting, setting_name, subject_line
from optg.naming import visible

if TYPE_CHECKING:
    from rich.table import Table


def benchmark_table(benchmark: Benchmark) -> "Table":
    """Return one row per engine and setting."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    table = Table(
        title=Text(visible(subject_line(benchmark)), "table.title"),
        caption=Text(visible(benchmark.hardware), "table.caption"),
        title_justify="left",
        caption_justify="left",
        box=SIMPLE_HEAD,
        show_edge=False,
    )
    table.add_column("engine", no_wrap=True)
    for column in ("ms", "quartiles", "images/s", "× torch", "error"):
        table.add_column(column, justify="right", no_wrap=True)
    for (batch, threads), timings in by_setting(benchmark).items():
        table.add_row(setting_name(batch, threads), style="italic")
        torch_time = next((t.milliseconds for t in timings if t.engine == "torch"), None)
        for t in timings:
            table.add_row(
                f"  {t.engine}",
                format_milliseconds(t.milliseconds),
                f"{format_milliseconds(t.low)}–{format_milliseconds(t.high)}",
                f"{t.images_per_second:,.0f}",
                f"{torch_time / t.milliseconds:.2f}" if torch_time else "",
                f"{t.difference:.0e}",
                style="bold" if t.engine == "optg" else "",
            )
        table.add_section()
    return table


def format_milliseconds(value: float) -> str:
    return f"{value:,.{3 if value < 10 else 2 if value < 100 else 0}f}"
