"""Text and tables in the terminal. Names of runs, layers and labels are printed as they are, whatever they contain."""

import sys
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from optg.naming import visible


class PlainConsole(Console):
    """A console that prints text as it is: no markup in brackets, no emoji codes, and invisible characters as escapes."""

    def __init__(self, **options: Any) -> None:
        super().__init__(markup=False, emoji=False, **options)

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(visible(text), **options)


def wide_console() -> PlainConsole:
    """Return a console as wide as the terminal; in a file or pipe, wide enough to keep table cells whole."""
    return PlainConsole(width=None if sys.stdout.isatty() else 200)


def layer_table(layers: list[Any], title: str, notes: Sequence[str]) -> Table:
    """Return the summaries of `optg.core.summary` as a table with notes below it. Users print it on a console of their own."""
    caption = Text("\n".join(map(visible, notes)), "table.caption") if notes else None
    table = Table(title=Text(visible(title), "table.title"), title_justify="left", caption=caption, caption_justify="left")
    table.add_column("layer", overflow="fold")
    structured = any(layer.structure != "unstructured" for layer in layers)
    for column in ("shape", *["structure"] * structured, "weights", "kept", "density", "removed", "revived"):
        table.add_column(column, justify="right")

    def add(name: str, shape: str, structure: str, *counts: int, **style: Any) -> None:
        size, kept, *rest = counts
        density = f"{kept / size:.2%}" if size else "–"
        cells = [shape, *[structure] * structured, f"{size:,}", f"{kept:,}", density, *(f"{n:,}" for n in rest)]
        table.add_row(Text(visible(name)), *cells, **style)

    keys = "weights", "kept", "removed", "revived"
    for layer in layers:
        add(layer.name, "×".join(map(str, layer.shape)), layer.structure, *(getattr(layer, key) for key in keys))
    table.add_section()
    add("all", "", "", *(sum(getattr(layer, key) for layer in layers) for key in keys), style="bold")
    return table
