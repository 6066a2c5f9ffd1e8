"""Plots as matplotlib figures, and as SVG: for the page and in files."""

import re
import xml.etree.ElementTree as ElementTree

import matplotlib
import numpy as np
import pytest

from optg.report import figures
from optg.report.palette import COLOURS, Look
from optg.report.plot import LegendEntry, Plot, Series, draw, file_svg, inline_svg, swatch, thin_out
from optg.report.scales import linear
from tests.report.fake_runs import read_group, write_run

SVG = "{http://www.w3.org/2000/svg}"
RED = Look(COLOURS[0][0])


def make_plot(*series: Series, **options) -> Plot:
    legend = [LegendEntry(s.label, s.look, s.line, s.markers) for s in series]
    return Plot(
        "name", "A title", linear("across", low=0, high=10), linear("up", low=0, high=100), list(series), legend, **options
    )


def texts(svg: str) -> list[str]:
    return ["".join(element.itertext()) for element in ElementTree.fromstring(svg).iter(f"{SVG}text")]


def titles(svg: str) -> list[str]:
    """Return the tooltips of an SVG for the page."""
    return ["".join(element.itertext()) for element in ElementTree.fromstring(svg).iter("title")]


def test_a_figure_has_the_points_colours_and_names_of_its_series():
    dashed = Look(COLOURS[1][0], "s", (6, 2), hollow=True)
    lines = Series("one", RED, [(0, 10), (5, 50), (10, 90)]), Series("two", dashed, [(1, 20)], line=False, markers=True)
    figure, tooltips = draw(make_plot(*lines))
    (axes,) = figure.axes
    one, two = axes.get_lines()
    assert one.get_xydata().tolist() == [[0, 10], [5, 50], [10, 90]] and two.get_xydata().tolist() == [[1, 20]]
    assert (one.get_color(), one.get_marker(), two.get_marker(), two.get_linestyle()) == (COLOURS[0][0], "None", "s", "None")
    assert (two.get_markeredgecolor(), two.get_markerfacecolor()) == (COLOURS[1][0], "none")
    assert [tooltips[line.get_gid()] for line in (one, two)] == [["one"], ["two", "two"]]
    assert (axes.get_xlabel(), axes.get_ylabel(), axes.get_xlim(), axes.get_ylim()) == ("across", "up", (0, 10), (0, 100))


def test_points_outside_the_scales_are_not_drawn():
    points = [(1, 10), (2, 500), (3, 30)]
    figure, tooltips = draw(make_plot(Series("one", RED, points, markers=True, notes=["a", "b", "c"])))
    line, markers = figure.axes[0].get_lines()
    assert np.isnan(line.get_ydata()).tolist() == [False, True, False]
    assert markers.get_xydata().tolist() == [[1, 10], [3, 30]] and tooltips[markers.get_gid()] == ["one", "a", "c"]


def test_a_single_point_of_a_line_is_a_marker():
    (markers,) = draw(make_plot(Series("one", RED, [(1, 10)])))[0].axes[0].get_lines()
    assert markers.get_marker() == "o"


def test_long_lines_are_thinned_out_but_keep_ends_and_peaks():
    points = [(float(x), float(x % 7)) for x in range(100_000)]
    points[54_321] = (54_321.0, 99.0)
    thin = thin_out(points)
    assert len(thin) <= 302 and (thin[0], thin[-1]) == (points[0], points[-1]) and points[54_321] in thin
    assert thin == sorted(thin) and thin_out(points[:300]) == points[:300]
    x = linear("", low=0, high=100_000)
    assert len(inline_svg(Plot("n", "t", x, linear("", low=0, high=100), [Series("one", RED, points)], []))) < 8_000


def test_an_inline_figure_has_variables_for_colours_and_nothing_that_clashes_on_a_page():
    notes = ["first: 20 %", "second: 40 %"]
    svg = inline_svg(make_plot(Series("a <run>", RED, [(1, 20), (2, 40)], markers=True, notes=notes)))
    assert titles(svg) == ["a <run>", "a <run>", *notes]
    assert "var(--c0)" in svg and "var(--quiet)" in svg and not re.search("#[0-9a-f]{6}", svg)
    assert not re.search(r"\b(id|href|class)=|font-family|url\(|<(style|defs|use|image|metadata)\b", svg)
    assert 'role="img" aria-label="A title"' in svg
    words = ["".join(element.itertext()) for element in ElementTree.fromstring(svg).iter("text")]
    assert {"across", "up", "0", "10", "100"} <= set(words) and "A title" not in words


def test_the_users_own_matplotlib_settings_do_not_matter():
    plot = make_plot(Series("one", RED, [(1, 20), (2, 40)]))
    expected = inline_svg(plot)
    with matplotlib.rc_context({"axes.grid": True, "font.size": 30, "lines.linewidth": 9, "savefig.bbox": "tight"}):
        assert inline_svg(plot) == expected


def test_a_file_has_title_legend_and_both_colour_schemes():
    svg = file_svg(make_plot(Series("one", RED, [(1, 20), (2, 40)]), below=["gmp (1 %)"]))
    assert {"A title", "one", "across", "up"} <= set(texts(svg))
    assert "Not drawn because far below the others: gmp (1 %)." in " ".join(texts(svg))
    assert COLOURS[0][0] in svg and COLOURS[0][1] in svg and "prefers-color-scheme:dark" in svg and "var(--page)" in svg


def test_a_file_of_a_figure_is_xml_whatever_its_runs_are_called(tmp_path):
    write_run(tmp_path / "<b>&\x01$x$", "optg", model="a:<i>", epochs=20)
    write_run(tmp_path / "b", "optg", model="a:<i>", epochs=20)
    svg = file_svg(figures.accuracy(read_group(tmp_path)))
    assert "Test accuracy" in texts(svg) and sum("<b>&�$x$" in word for word in texts(svg)) == 1
    assert not list(ElementTree.fromstring(svg).iter("script"))


@pytest.mark.parametrize("line", [False, True])
@pytest.mark.parametrize("marker", [False, True])
def test_a_swatch_shows_line_and_marker(line, marker):
    svg = swatch(Look(COLOURS[2][0], "D", (2, 2)), line, marker)
    paths = [element.get("style") for element in ElementTree.fromstring(svg).iter("path")]
    assert len(paths) == line + marker and all("var(--c2)" in style for style in paths)
    assert ("stroke-dasharray" in svg) is line
