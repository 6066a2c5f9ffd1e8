"""Where tables are printed."""

import sys

from rich.console import Console


def wide_console() -> Console:
    """As wide as the terminal; in a file or a pipe wide enough for a table's figures to stay whole."""
    return Console(width=None if sys.stdout.isatty() else 200)
