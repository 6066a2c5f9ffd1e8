"""Names in messages: the nearest known name for an unknown one."""

import difflib
from collections.abc import Iterable


def nearest(name: str, known: Iterable[str]) -> str:
    """A hint to end an error message with: the known names, and the one that was probably meant."""
    known = list(known)
    close = difflib.get_close_matches(name, known, n=1)
    return (f"did you mean {close[0]!r}? " if close else "") + f"Known: {', '.join(known)}"
