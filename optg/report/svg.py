"""Matplotlib figures as compact SVG that can stand in a page.

Matplotlib's own SVG has ids, style sheets and a font for each text, which would clash with those of the page and with each
other. Here a figure becomes plain paths and texts; its light colours become CSS variables, and tooltips are added.
"""

import io
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from typing import Any
from xml.etree.ElementTree import Element

from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from optg.report.markup import escape
from optg.report.palette import VARIABLES

NO_METADATA = dict.fromkeys(("Creator", "Date", "Format", "Type"))
SVG = "{http://www.w3.org/2000/svg}"
HREF = "{http://www.w3.org/1999/xlink}href"
NUMBER = re.compile(r"-?\d+\.\d+")
COLOUR = re.compile("#[0-9a-f]{6}")


def svg_body(figure: Figure, tooltips: dict[str, list[str]], **options: Any) -> tuple[str, str]:
    """Return what is inside the <svg> element, and its viewBox.

    Args:
        tooltips: of an artist by its gid: its label, and then a text for each of its markers, if they have texts.
        options: of `Figure.savefig`.
    """
    buffer = io.BytesIO()
    FigureCanvasSVG(figure).print_figure(buffer, format="svg", metadata=NO_METADATA, **{"facecolor": "none"} | options)
    root = ElementTree.fromstring(buffer.getvalue())
    shapes = {e.get("id"): e for defs in root.iter(f"{SVG}defs") for e in defs if e.get("id")}
    return "".join(write_children(root, shapes, tooltips, [])), root.attrib["viewBox"]


def write_children(parent: Element, shapes: dict[str | None, Element], tooltips: Any, notes: list[str]) -> Iterator[str]:
    for element in parent:
        kind = element.tag.removeprefix(SVG)
        if kind == "g":
            label, *texts = tooltips.get(element.get("id"), ("",))
            inner = "".join(write_children(element, shapes, tooltips, texts or notes))
            yield f"<g><title>{escape(label)}</title>{inner}</g>" if label and inner else inner
        elif kind == "path":
            yield path(element.get("d", ""), element)
        elif kind == "use":  # a marker: its shape is written where it stands, as ids would clash on the page
            place = f' transform="translate({short(element.attrib["x"])} {short(element.attrib["y"])})"'
            yield path(shapes[element.attrib[HREF][1:]].attrib["d"], element, place, notes.pop(0) if notes else "")
        elif kind == "text":
            yield text(element)


def path(outline: str, element: Element, place: str = "", note: str = "") -> str:
    """Return a <path>, or nothing if it is invisible."""
    style = css(element)
    if not outline or style == "fill:none":
        return ""
    data = re.sub(r" ?\n| (?=[A-Za-z])|(?<=[A-Za-z]) ", "", short(outline)).strip()
    end = f"><title>{escape(note)}</title></path>" if note else "/>"
    return f'<path d="{data}" style="{style}"{place}{end}'


def text(element: Element) -> str:
    """Return a <text> in the font of whatever it stands in."""
    style = re.sub(r"font-size:11px;?|font-family:[^;]*;?", "", css(element)).strip(";")
    if "x" in element.attrib:
        place = f'x="{short(element.attrib["x"])}" y="{short(element.attrib["y"])}"'
    else:  # one of several lines
        place = f'transform="{short(element.attrib["transform"]).replace(" rotate(-0)", "")}"'
    return f'<text {place} style="{style}">{escape(element.text or "")}</text>'


def css(element: Element) -> str:
    style = re.sub(r"([:;,]) ", r"\1", element.get("style", ""))
    return COLOUR.sub(lambda match: VARIABLES.get(match[0], match[0]), short(style))


def short(numbers: str) -> str:
    """Round numbers to a tenth, which is a tenth of a pixel on a phone."""
    return NUMBER.sub(lambda match: f"{float(match[0]):.1f}".removesuffix(".0"), numbers)
