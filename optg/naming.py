"""Names in messages: suggest the nearest known one, and show what is invisible."""

import difflib
import re
from collections.abc import Iterable

# Control characters but newline and tab, lone surrogates, and the characters that hide text or reverse its direction.
INVISIBLE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb"
    "\ud800-\udfff\U000e0000-\U000e007f]"
)


def nearest(name: str, known: Iterable[str]) -> str:
    """Return a hint to end an error message with: the most similar known name, if any, and the full list."""
    known = list(known)
    close = difflib.get_close_matches(name, known, n=1)
    return (f"did you mean {close[0]!r}? Known" if close else "known") + f": {', '.join(known)}"


def visible(text: object) -> str:
    """Return a text for the terminal, with invisible characters written as escapes such as \\u202e."""
    return INVISIBLE.sub(lambda match: match[0].encode("unicode_escape", "surrogatepass").decode(), str(text))
