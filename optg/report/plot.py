"""Plots as matplotlib figures: lines and points between two scales.

On the page a plot's title and legend are HTML, which wraps; a plot in a file of its own carries both.
"""

import textwrap
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from optg.report.markup import escape, plain, plural
from optg.report.palette import LINE, PAGE, QUIET, TEXT, Look, css_variables
from optg.report.scales import Scale
from optg.report.svg import svg_body

WIDTH = 360  # points, which are the units of the SVG
LEFT, RIGHT, TOP, BOTTOM = 46, 16, 22, 34
FONT = "system-ui,-apple-system,'Segoe UI',Roboto,'Helvetica Neue',Arial,sans-serif"
MAX_NAMED = 12  # a legend names up to this many runs one by one, and the methods if there are more
MAX_BUCKETS = 150  # a line is thinned out to the lowest and highest point of so many buckets
SIZES = {"o": 7.2, "s": 6.4, "D": 6.0, "^": 8.0, "v": 8.0}  # marker sizes in points
FILE_HEADER = "<!-- made by optg report -->\n"  # the next report may replace files that start with this
STYLE: Any = {
    "font.family": "sans-serif",
    "font.size": 11,
    "lines.scale_dashes": False,
    "lines.solid_capstyle": "butt",
    "text.parse_math": False,
    "text.usetex": False,
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "optg",  # the same figure gives the same bytes
}

Point = tuple[float, float]


class LegendEntry(NamedTuple):
    label: str
    look: Look
    line: bool
    marker: bool


@dataclass
class Series:
    label: str
    look: Look
    points: list[Point]
    line: bool = True
    markers: bool = False
    notes: list[str] = field(default_factory=list)  # tooltip of each point


@dataclass
class Plot:
    name: str  # part of the file name
    title: str
    x: Scale
    y: Scale
    series: list[Series]
    legend: list[LegendEntry]
    missing: list[str] = field(default_factory=list)  # runs that recorded nothing to show here
    below: list[str] = field(default_factory=list)  # collapsed runs, named instead of drawn
    height: int = 236

    @property
    def remark(self) -> str:
        return f"Not drawn because far below the others: {name_or_count(self.below)}." if self.below else ""


def name_or_count(labels: list[str]) -> str:
    """Return the labels, or only their number if there are many."""
    return ", ".join(labels) if len(labels) <= MAX_NAMED else plural(len(labels), "run")


def inline_svg(plot: Plot) -> str:
    """Return the plot for the page: no title, no legend, no style sheet of its own."""
    figure, tooltips = draw(plot)
    with style():
        body, box = svg_body(figure, tooltips)
    return (
        f'<svg viewBox="{box}" role="img" aria-label="{escape(plot.title)}" font-size="11" stroke-linejoin="round">{body}</svg>'
    )


def file_svg(plot: Plot) -> str:
    """Return the plot for a file: with title, legend, background and style sheet."""
    figure, tooltips = draw(plot)
    with style():
        add_title_and_legend(figure, plot)
        body, box = svg_body(figure, tooltips, bbox_inches="tight", pad_inches=0.12, facecolor=PAGE[0])
    _, _, width, height = map(float, box.split())
    return (
        f'{FILE_HEADER}<svg xmlns="http://www.w3.org/2000/svg" viewBox="{box}" width="{2 * width:.0f}" '
        f'height="{2 * height:.0f}" font-family="{FONT}" font-size="11" stroke-linejoin="round">\n'
        f"<style>{css_variables()}</style>\n{body}\n</svg>\n"
    )


@contextmanager
def style() -> Iterator[None]:
    """Use matplotlib's defaults and STYLE, whatever the user's own matplotlibrc says."""
    with matplotlib.rc_context(), warnings.catch_warnings():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(STYLE)
        warnings.filterwarnings("ignore", "Glyph .* missing from")  # the browser has a font for it
        yield


def draw(plot: Plot) -> tuple[Figure, dict[str, list[str]]]:
    """Return the plot as a matplotlib figure, and the tooltips of its artists by their gid."""
    with style():
        wide, high = WIDTH - LEFT - RIGHT, plot.height - TOP - BOTTOM
        figure = Figure(figsize=(WIDTH / 72, plot.height / 72), facecolor="none")
        axes = figure.add_axes((LEFT / WIDTH, BOTTOM / plot.height, wide / WIDTH, high / plot.height), facecolor="none")
        axes.spines[:].set_visible(False)
        plot.x.apply(axes, "x")
        plot.y.apply(axes, "y")
        axes.set_axisbelow(True)
        axes.grid(axis="y", color=LINE[0], linewidth=1)
        axes.tick_params(axis="x", color=LINE[0], labelcolor=QUIET[0], length=4, width=1, pad=3)
        axes.tick_params(axis="y", length=0, labelcolor=QUIET[0], pad=6)
        axes.set_xlabel(plot.x.label, loc="right", color=QUIET[0], labelpad=2)
        axes.set_ylabel(plot.y.label, rotation=0, ha="left", va="baseline", color=QUIET[0])
        axes.yaxis.set_label_coords(-40 / wide, 1 + 11 / high)
        tooltips: dict[str, list[str]] = {}
        for i, series in enumerate(plot.series):
            for artist, notes in artists(series, plot, thin=len(plot.series) > MAX_NAMED):
                artist.set(gid=f"series{i}{'-points' if notes else ''}", clip_on=False)
                axes.add_line(artist)
                tooltips[artist.get_gid() or ""] = [series.label, *notes]
        return figure, tooltips


def artists(series: Series, plot: Plot, thin: bool) -> Iterator[tuple[Line2D, list[str]]]:
    """Yield the line of a series and its markers, with the markers' tooltips. Points outside the scales are left out."""
    inside = [plot.x.contains(x) and plot.y.contains(y) for x, y in series.points]
    if series.line and len(series.points) > 1:
        gaps = [(x, y if seen else np.nan) for (x, y), seen in zip(series.points, inside)]
        xs, ys = zip(*thin_out(gaps))
        yield Line2D(xs, ys, **line_style(series.look), linewidth=1.0 if thin else 1.6), []
    if series.markers or len(series.points) == 1:
        notes = series.notes or [series.label] * len(series.points)
        seen = [(x, y, note) for (x, y), note, shown in zip(series.points, notes, inside) if shown]
        if seen:
            markers = Line2D([x for x, *_ in seen], [y for _, y, _ in seen], linestyle="none", **marker_style(series.look))
            yield markers, [note for *_, note in seen]


def line_style(look: Look) -> dict[str, Any]:
    return {"color": look.colour, "linestyle": (0, look.dash) if look.dash else "-"}


def marker_style(look: Look) -> dict[str, Any]:
    return {
        "marker": look.marker, "markersize": SIZES[look.marker], "markeredgecolor": look.colour,
        "markeredgewidth": 1.3 if look.hollow else 0.8, "markerfacecolor": "none" if look.hollow else look.colour,
    }  # fmt: skip


def thin_out(points: list[Point]) -> list[Point]:
    """Return at most two points for each bucket of a long line, the lowest and the highest, and both ends."""
    if len(points) <= 2 * MAX_BUCKETS:
        return points
    kept = {0, len(points) - 1}
    for bucket in np.array_split(np.arange(len(points)), MAX_BUCKETS):
        finite = [i for i in bucket.tolist() if np.isfinite(points[i][1])] or bucket.tolist()[:1]
        kept |= {min(finite, key=lambda i: points[i][1]), max(finite, key=lambda i: points[i][1])}
    return [points[i] for i in sorted(kept)]


def handle(look: Look, line: bool, marker: bool) -> Line2D:
    """Return the sample of a look in a legend."""
    drawn = {**(line_style(look) if line else {"linestyle": "none"}), **(marker_style(look) if marker else {})}
    return Line2D([0.0, 0.5, 1.0], [0.5] * 3, linewidth=1.8, markevery=[1], **drawn)


@cache
def swatch(look: Look, line: bool = True, marker: bool = False) -> str:
    """Return a legend's sample of a look for the page, 22 points wide."""
    with style():
        figure = Figure(figsize=(22 / 72, 11 / 72), facecolor="none")
        figure.add_artist(handle(look, line, marker))
        body, box = svg_body(figure, {})
    return f'<svg class="swatch" viewBox="{box}" aria-hidden="true">{body}</svg>'


def add_title_and_legend(figure: Figure, plot: Plot) -> None:
    """Put the title above the figure, and the remark and the legend below it."""
    figure.text(6 / WIDTH, 1 + 6 / plot.height, plot.title, fontsize=13, fontweight="bold", color=TEXT[0])
    remark = textwrap.wrap(plain(plot.remark), 58)
    figure.text(6 / WIDTH, 0, "\n".join(remark), va="top", color=TEXT[0], linespacing=1.2)
    labels = [textwrap.fill(plain(entry.label), 58) for entry in plot.legend]
    longest = max((len(line) for label in labels for line in label.splitlines()), default=0)
    handles = [handle(*entry[1:]) for entry in plot.legend]
    figure.legend(
        handles, labels, loc="upper left", bbox_to_anchor=(6 / WIDTH, -(15 * len(remark) + 2) / plot.height), frameon=False,
        ncols=max(1, min(4, (WIDTH - 16) // (36 + 6 * longest))), labelcolor=TEXT[0], borderpad=0, borderaxespad=0,
        handlelength=2, handletextpad=0.6, labelspacing=0.35, columnspacing=1.4,
    )  # fmt: skip
