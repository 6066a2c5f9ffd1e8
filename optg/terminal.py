"""Print tables."""

import sys

from rich.console import Console


def wide_console() -> Console:
    """Return a console as wide as the terminal, or 200 columns if output goes to a file or pipe, so that tables stay whole."""
    return Console(width=None if sys.stdout.isatty() else 200)
