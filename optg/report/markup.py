"""Text for HTML and SVG: whatever a name holds, it stays text."""

import html
import re
from typing import TypeGuard

ILLEGAL = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")  # in XML, however they are escaped

UNITS = (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3))


def text(value: object) -> str:
    """Escaped, for use between tags and in attributes."""
    return html.escape(ILLEGAL.sub("�", str(value)), quote=True)


def missing(said: str) -> str:
    """A line for what is not there; `said` is escaped already."""
    return f'<p class="missing">{said}</p>'


def counted(count: int, name: str) -> str:
    return f"{count} {name}{'s' if count != 1 else ''}"


def slug(value: str) -> str:
    """A name for files and anchors."""
    return re.sub("[^a-z0-9]+", "-", value.lower()).strip("-")[:60] or "runs"


def is_number(value: object) -> TypeGuard[float]:
    """One that can be drawn: neither NaN nor infinite."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 1e300


def percent(value: float | None, digits: int = 2) -> str:
    """A share in percent, without the sign; a dash where there is none."""
    return f"{100 * value:.{digits}f}" if is_number(value) else "–"


def share(value: float) -> str:
    """A sparsity as people say it: 95, 99.5, never 94.99999."""
    return f"{round(100 * value, 3):g}\N{NO-BREAK SPACE}%"


def signed(value: float | None) -> str:
    """A difference in points, with a real minus."""
    return "–" if not is_number(value) else f"{100 * value:+.2f}".replace("-", "−")


def compact(value: float | None) -> str:
    """A large count in three figures: 17.5 M."""
    if not is_number(value):
        return "–"
    unit, size = next(((unit, size) for unit, size in UNITS if abs(value) >= 0.9995 * size), ("", 1.0))
    return f"{value / size:#.3g}".rstrip(".") + f" {unit}" if unit else f"{value:g}"


def brief(value: float) -> str:
    """A round number, for an axis: 20M."""
    unit, size = next(((unit, size) for unit, size in UNITS if abs(value) >= 0.9995 * size), ("", 1.0))
    return f"{value / size:g}{unit}"


def duration(seconds: float | None) -> str:
    if not is_number(seconds):
        return "–"
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02} s"
    return f"{minutes // 60} h {minutes % 60:02} min"
