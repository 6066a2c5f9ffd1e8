"""Tables in the terminal."""

import sys
from typing import Any

from rich.console import Console
from rich.table import Table


def wide_console() -> Console:
    """Return a console as wide as the terminal; in a file or pipe, wide enough to keep table cells whole."""
    return Console(width=None if sys.stdout.isatty() else 200)


def layer_table(layers: list[Any], title: str) -> Table:
    """Return the summaries of `optg.core.summary` as a table."""
    table = Table(title=title, title_justify="left")
    table.add_column("layer", overflow="fold")
    for column in ("shape", "weights", "kept", "density", "removed", "revived"):
        table.add_column(column, justify="right")

    def add(name: str, shape: str, size: int, kept: int, removed: int, revived: int, **style: Any) -> None:
        table.add_row(name, shape, f"{size:,}", f"{kept:,}", f"{kept / size:.2%}", f"{removed:,}", f"{revived:,}", **style)

    for layer in layers:
        add(layer.name, "×".join(map(str, layer.shape)), layer.weights, layer.kept, layer.removed, layer.revived)
    table.add_section()
    totals = [sum(getattr(layer, key) for layer in layers) for key in ("weights", "kept", "removed", "revived")]
    add("all", "", *totals, style="bold")
    return table
