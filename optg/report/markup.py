"""Text and numbers for HTML and SVG. Names of runs are always escaped."""

import html
import re
from typing import TypeGuard

from optg.naming import INVISIBLE

NOT_IN_XML = re.compile("[\ufffe\uffff]")  # not even escaped, like most of the invisible characters

UNITS = (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3))


def plain(value: object) -> str:
    """Return text with replacements for invisible characters and those that XML forbids."""
    return NOT_IN_XML.sub("�", INVISIBLE.sub("�", str(value)))


def escape(value: object) -> str:
    """Escape text for use between tags and in attributes."""
    return html.escape(plain(value), quote=True)


def missing_note(markup: str) -> str:
    """Return a paragraph that says what is missing. The argument is escaped already."""
    return f'<p class="missing">{markup}</p>'


def plural(count: int, noun: str) -> str:
    return f"{count} {noun}{'s' if count != 1 else ''}"


def slug(value: str) -> str:
    """Return a name for files and anchors."""
    return re.sub("[^a-z0-9]+", "-", value.lower()).strip("-")[:60] or "runs"


def is_number(value: object) -> TypeGuard[float]:
    """Return whether a value can be shown: a number that is neither NaN nor absurdly large."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 1e100


def percent(value: float | None, digits: int = 2) -> str:
    """Format a share as a percentage without the sign, or a dash if there is none."""
    return f"{100 * value:.{digits}f}" if is_number(value) else "–"


def sparsity_label(value: float) -> str:
    """Format a sparsity as people say it: 95 %, 99.5 %, never 94.99999 %."""
    return f"{round(100 * value, 3):g}\N{NO-BREAK SPACE}%"


def signed(value: float | None) -> str:
    """Format a difference in percentage points, with a typographic minus."""
    return "–" if not is_number(value) else f"{100 * value:+.2f}".replace("-", "−")


def compact(value: float | None) -> str:
    """Format a large count with three significant digits: 17.5 M."""
    if not is_number(value):
        return "–"
    unit, size = unit_of(value)
    return f"{value / size:#.3g}".rstrip(".") + f" {unit}" if unit else f"{value:g}"


def axis_number(value: float) -> str:
    """Format a round number for an axis: 20M."""
    unit, size = unit_of(value)
    return f"{value / size:g}{unit}"


def unit_of(value: float) -> tuple[str, float]:
    return next(((unit, size) for unit, size in UNITS if abs(value) >= 0.9995 * size), ("", 1.0))


def duration(seconds: float | None) -> str:
    if not is_number(seconds):
        return "–"
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02} s"
    return f"{minutes // 60} h {minutes % 60:02} min"
