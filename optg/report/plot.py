"""A figure as SVG: lines and points between two axes. Colours are classes, so one figure serves a light and a dark page.

On the page a figure has its title and legend outside, in HTML, where they wrap; as a file it carries both, and its own style.
"""

import math
import textwrap
from collections.abc import Iterable
from dataclasses import dataclass, field

from optg.report.axes import Axis
from optg.report.markup import counted, text
from optg.report.palette import Look, style

WIDTH = 360
LEFT, RIGHT, TOP, BOTTOM = 46, 16, 22, 34
FONT = "system-ui,-apple-system,'Segoe UI',Roboto,'Helvetica Neue',Arial,sans-serif"
MANY = 12  # runs that are named one by one; of more, a legend names the methods
MADE = "<!-- made by optg report -->\n"  # files that begin so may be replaced by the next report


Entry = tuple[str, Look, bool, bool]  # of a legend: label, look, with a line, with a marker


@dataclass
class Series:
    label: str
    look: Look
    points: list[tuple[float, float]]
    line: bool = True
    markers: bool = False
    notes: list[str] = field(default_factory=list)  # what a point says when it is pointed at


@dataclass
class Figure:
    name: str  # of its file
    title: str
    x: Axis
    y: Axis
    series: list[Series]
    legend: list[Entry]
    missing: list[str] = field(default_factory=list)  # runs that recorded nothing of it
    below: list[str] = field(default_factory=list)  # runs so far down that they are named instead of drawn
    height: int = 236

    @property
    def remark(self) -> str:
        """What its reader would miss."""
        return f"Not drawn, far below the others: {named(self.below)}." if self.below else ""


def named(labels: list[str]) -> str:
    """All of them, or how many where that would be a long list."""
    return ", ".join(labels) if len(labels) <= MANY else counted(len(labels), "run")


def inline(figure: Figure) -> str:
    """For the page: no title, no legend, no style of its own."""
    return (
        f'<svg viewBox="0 0 {WIDTH} {figure.height}" role="img" aria-label="{text(figure.title)}" font-size="11" class="ink">'
        f"{drawing(figure)}</svg>"
    )


def alone(figure: Figure) -> str:
    """For a file: with title, legend, background and style."""
    rows = legend_rows(figure.legend)
    words = textwrap.wrap(figure.remark, 58)
    below = 26 + figure.height + 17 * len(rows)
    height = below + 14 * len(words) + 8
    parts = [
        f'<text x="12" y="20" font-size="13" font-weight="600" fill="currentColor">{text(figure.title)}</text>',
        f'<g transform="translate(0 26)">{drawing(figure)}</g>',
    ]
    for i, row in enumerate(rows):
        for x, (label, look, line, marker) in row:
            y = 26 + figure.height + 17 * i + 4
            parts.append(f'<g transform="translate({x} {y})">{sample(look, line, marker)}')
            parts.append(f'<text x="28" y="9" fill="currentColor">{text(label)}</text></g>')
    parts += [f'<text x="12" y="{below + 14 * i + 12}" fill="currentColor">{text(w)}</text>' for i, w in enumerate(words)]
    return (
        f'{MADE}<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        f'width="{2 * WIDTH}" height="{2 * height}" font-family="{FONT}" font-size="11" class="ink">\n'
        f"<style>{style()}</style>\n"
        f'<rect class="page" width="100%" height="100%" fill="currentColor"/>\n{"".join(parts)}\n</svg>\n'
    )


def legend_rows(legend: list[Entry]) -> list[list[tuple[float, Entry]]]:
    """Entries side by side in columns as wide as the longest label needs."""
    longest = max((len(label) for label, *_ in legend), default=0)
    columns = max(1, min(4, (WIDTH - 16) // (36 + 6 * longest)))
    wide = (WIDTH - 16) / columns
    return [[(12 + wide * j, entry) for j, entry in enumerate(legend[i : i + columns])] for i in range(0, len(legend), columns)]


def drawing(figure: Figure) -> str:
    wide, high = WIDTH - LEFT - RIGHT, figure.height - TOP - BOTTOM
    parts = [grid(figure.x, figure.y, wide, high)]
    body = "".join(draw(series, figure, wide, high) for series in figure.series)
    # a nested svg clips what is drawn in it; the margin of 5 keeps markers on the edge whole
    parts.append(f'<svg x="{LEFT - 5}" y="{TOP - 5}" width="{wide + 10}" height="{high + 10}">{body}</svg>')
    return "".join(parts)


def grid(x: Axis, y: Axis, wide: int, high: int) -> str:
    """Grid lines, ticks and the names of both axes."""
    lines, words = [], []
    for at, written in y.ticks:
        height = TOP + high * (1 - at)
        lines.append(f"M{LEFT} {height:.1f}h{wide}")
        words.append(f'<text x="{LEFT - 6}" y="{height + 4:.1f}" text-anchor="end">{text(written)}</text>')
    for at, written in x.ticks:
        across = LEFT + wide * at
        lines.append(f"M{across:.1f} {TOP + high}v4")
        words.append(f'<text x="{across:.1f}" y="{TOP + high + 15}" text-anchor="middle">{text(written)}</text>')
    words.append(f'<text x="{LEFT - 40}" y="11">{text(y.label)}</text>')
    words.append(f'<text x="{LEFT + wide}" y="{TOP + high + 30}" text-anchor="end">{text(x.label)}</text>')
    return (
        f'<path class="line" d="{"".join(lines)}" stroke="currentColor" fill="none"/>'
        f'<g class="quiet" fill="currentColor">{"".join(words)}</g>'
    )


def draw(series: Series, figure: Figure, wide: int, high: int) -> str:
    places = [(5 + wide * figure.x.place(x), 5 + high * (1 - figure.y.place(y))) for x, y in series.points]
    places = [(x, min(max(y, -99.0), 999.0)) for x, y in places]
    parts = [f"<title>{text(series.label)}</title>"]
    if series.line and len(places) > 1:
        path = "L".join(f"{x:.1f} {y:.1f}" for x, y in places)
        dash = f' stroke-dasharray="{series.look.dash}"' if series.look.dash else ""
        width = 1.6 if len(figure.series) <= 12 else 1
        parts.append(
            f'<path d="M{path}" fill="none" stroke="currentColor" stroke-width="{width}" stroke-linejoin="round"{dash}/>'
        )
    if series.markers or len(places) == 1:
        notes = series.notes or [""] * len(places)
        parts += [mark(x, y, series.look, note) for (x, y), note in zip(places, notes)]
    return f'<g class="{series.look.colour}">{"".join(parts)}</g>'


def mark(x: float, y: float, look: Look, note: str = "", size: float = 3.6) -> str:
    """A marker; a hollow one lets the page through."""
    title = f"<title>{text(note)}</title>" if note else ""
    fill = 'fill="none" stroke-width="1.3"' if look.hollow else 'fill="currentColor" stroke-width=".8"'
    if look.marker == "circle":
        return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{size}" stroke="currentColor" {fill}>{title}</circle>'
    return f'<path d="M{outline(x, y, look.marker, size)}z" stroke="currentColor" {fill}>{title}</path>'


def outline(x: float, y: float, marker: str, size: float) -> str:
    turn, corners = {"square": (45, 4), "diamond": (0, 4), "up": (-90, 3), "down": (90, 3)}[marker]
    reach = size * (1.25 if corners == 4 else 1.4)
    angles: Iterable[float] = (math.radians(turn + 360 * i / corners) for i in range(corners))
    return "L".join(f"{x + reach * math.cos(a):.1f} {y + reach * math.sin(a):.1f}" for a in angles)


def sample(look: Look, line: bool, marker: bool) -> str:
    """A legend's picture of a look, 22 wide and 12 high."""
    dash = f' stroke-dasharray="{look.dash}"' if look.dash else ""
    stroke = f'<path d="M0 5.5h22" stroke="currentColor" stroke-width="1.8" fill="none"{dash}/>' if line else ""
    return f'<g class="{look.colour}">{stroke}{mark(11, 5.5, look) if marker else ""}</g>'
