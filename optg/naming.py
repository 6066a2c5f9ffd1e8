"""Suggest the nearest known name for an unknown one."""

import difflib
from collections.abc import Iterable


def nearest(name: str, known: Iterable[str]) -> str:
    """Return a hint to end an error message with: the most similar known name, if any, and the full list."""
    known = list(known)
    close = difflib.get_close_matches(name, known, n=1)
    return (f"did you mean {close[0]!r}? Known" if close else "known") + f": {', '.join(known)}"
