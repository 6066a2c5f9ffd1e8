"""Show the running jobs as a live table in a terminal."""

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.table import Table

from optg.experiments.launcher import Job
from optg.report.runs import parse_json


@contextlib.contextmanager
def live_table(console: Console, view: Callable[[], Table]) -> Iterator[None]:
    """Redraw a table below the other output, if the console is a terminal."""
    if not console.is_terminal:
        yield
        return
    with Live(get_renderable=view, console=console, refresh_per_second=2, transient=True):
        yield


def jobs_table(title: str, jobs: list[Job], output: Path) -> Table:
    """Return the newest metrics of each running job."""
    table = Table(title=title)
    for column in ("run", "epoch", "accuracy", "sparsity", "seconds"):
        table.add_column(column, justify="left" if column == "run" else "right", overflow="fold")
    for job in jobs:
        metrics = last_metrics(output / job.run.name / "metrics.jsonl")
        epoch = f"{metrics['epoch'] if metrics else 0}/{job.run.plan.recipe.epochs}"
        figures = (f"{metrics['accuracy']:.2%}", f"{metrics['sparsity']:.2%}") if metrics else ("", "")
        table.add_row(job.run.name, epoch, *figures, f"{time.monotonic() - job.started:.0f}")
    return table


def last_metrics(path: Path) -> dict[str, Any] | None:
    try:
        return parse_json(path.read_bytes().splitlines()[-1], str(path))
    except (OSError, ValueError, IndexError):  # the file is not there yet, or its last line is incomplete
        return None
