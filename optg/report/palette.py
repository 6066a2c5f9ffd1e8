"""The colours and markers of methods, in every figure of a page.

Each colour is a pair: one for a light page, one for a dark page. Figures are drawn in the light colours, and the SVG text
replaces each of them with a CSS variable that has both values. The nine colours of methods stay distinguishable for
colour-blind readers and stand out from both pages. Dense training is drawn in the colour of text.
"""

from collections.abc import Iterable
from dataclasses import dataclass

COLOURS = (  # light page, dark page
    ("#ba266d", "#fc5c9c"),
    ("#386caa", "#8ecbf5"),
    ("#9b6c00", "#ecad34"),
    ("#0a93ac", "#1fa0a0"),
    ("#8560f5", "#9a9dff"),
    ("#3a551d", "#7ea352"),
    ("#cc6a72", "#fec2b7"),
    ("#4c22b7", "#7973ec"),
    ("#76106f", "#b54ab5"),
)
TEXT, QUIET, LINE, PAGE, PANEL = (
    ("#1c2126", "#e4e7ea"),
    ("#5b646d", "#a3adb6"),
    ("#d9dde1", "#363d44"),
    ("#ffffff", "#15181b"),
    ("#f6f7f8", "#1c2024"),
)
PAIRS = {"text": TEXT, "quiet": QUIET, "line": LINE, "page": PAGE, "panel": PANEL} | {
    f"c{i}": pair for i, pair in enumerate(COLOURS)
}
VARIABLES = {light: f"var(--{name})" for name, (light, _) in PAIRS.items()}  # light colour -> CSS variable

# The paper's methods keep their colours on every page.
FIXED = ("optg", "gmp", "rigl", "granet", "set", "str", "snip", "grasp", "synflow")
MARKERS = ("o", "s", "D", "^", "v")
DASHES: tuple[tuple[float, ...], ...] = (
    (), (6, 2.5), (2, 2), (8, 2, 2, 2), (12, 3), (1, 3), (8, 2, 2, 2, 2, 2), (4, 4), (12, 2, 4, 2), (2, 5), (16, 2, 2, 2),
    (6, 2, 1, 2),
)  # fmt: skip


@dataclass(frozen=True)
class Look:
    """How a method or a run is drawn."""

    colour: str = TEXT[0]
    marker: str = "o"
    dash: tuple[float, ...] = ()  # points on and off; empty: a solid line
    hollow: bool = False


def choose_looks(ours: Iterable[str], papers: Iterable[str] = ()) -> dict[str, Look]:
    """Return a look for each method. Our methods choose their colours before methods that only the paper has.

    From the tenth method on, colours repeat with another marker and a dashed line.
    """
    slots: dict[str, int] = {}
    for methods in (set(ours), set(papers)):
        new = sorted(methods - {"dense", *slots}, key=lambda name: (name not in FIXED, name))
        slots |= {name: FIXED.index(name) for name in new if name in FIXED and FIXED.index(name) not in slots.values()}
        taken = set(slots.values())
        # Colour 0 is OptG's and is not used a second time.
        free = [slot for slot in range(10 * len(COLOURS)) if slot not in taken and (slot < len(COLOURS) or slot % len(COLOURS))]
        slots |= dict(zip([name for name in new if name not in slots], free))
    order = sorted(slots, key=lambda name: slots[name])
    return {"dense": Look()} | {name: look_of_slot(slots[name]) for name in order}


def look_of_slot(slot: int) -> Look:
    turn, colour = divmod(slot, len(COLOURS))
    return Look(COLOURS[colour][0], MARKERS[(colour + 2 * turn) % len(MARKERS)], DASHES[turn % len(DASHES)])


def css_variables() -> str:
    """Return the style sheet that defines all colours for a light and a dark page."""
    light, dark = (";".join(f"--{name}:{pair[i]}" for name, pair in PAIRS.items()) for i in (0, 1))
    return f":root{{{light}}}\n@media (prefers-color-scheme:dark){{:root{{{dark}}}}}"
