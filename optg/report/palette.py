"""A method's look: its colour and marker, the same in every figure of a page; a dash tells its runs apart.

The nine colours were searched for: they stay apart for people who confuse red and green, or blue and yellow, and stand out
from a white page and from a dark one (each is a pair for that). Dense is drawn in the colour of text.
"""

from collections.abc import Iterable
from dataclasses import dataclass

COLOURS = (  # on a light page, on a dark one
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
USUAL = ("optg", "gmp", "rigl", "granet", "set", "str", "snip", "grasp", "synflow")  # these keep their colour on every page
MARKERS = ("circle", "square", "diamond", "up", "down")
DASHES = (
    "", "6 2.5", "2 2", "8 2 2 2", "12 3", "1 3", "8 2 2 2 2 2", "4 4", "12 2 4 2", "2 5", "16 2 2 2", "6 2 1 2",
)  # fmt: skip


@dataclass(frozen=True)
class Look:
    colour: str = "ink"  # a class of the style sheet
    marker: str = "circle"
    dash: str = ""
    hollow: bool = False


def looks(ours: Iterable[str], theirs: Iterable[str] = ()) -> dict[str, Look]:
    """Each method's look, ours before the paper's. A tenth method shares a colour, with another marker and a dashed line."""
    slots: dict[str, int] = {}
    for methods in (set(ours), set(theirs)):
        new = sorted(methods - {"dense", *slots}, key=lambda name: (name not in USUAL, name))
        slots |= {name: USUAL.index(name) for name in new if name in USUAL and USUAL.index(name) not in slots.values()}
        taken = set(slots.values())
        free = [slot for slot in range(10 * len(COLOURS)) if slot not in taken and (slot < len(COLOURS) or slot % len(COLOURS))]
        slots |= dict(zip([name for name in new if name not in slots], free))
    order = sorted(slots, key=lambda name: slots[name])
    return {"dense": Look()} | {name: look_of(slots[name]) for name in order}


def look_of(slot: int) -> Look:
    turn, colour = divmod(slot, len(COLOURS))
    return Look(f"c{colour}", MARKERS[(colour + 2 * turn) % len(MARKERS)], DASHES[turn % len(DASHES)])


def style() -> str:
    """The style sheet that gives these classes their colours, on a light and on a dark page."""
    pairs = {".ink": TEXT, ".quiet": QUIET, ".line": LINE, ".page": PAGE} | {f".c{i}": c for i, c in enumerate(COLOURS)}
    light, dark = ("".join(f"{name}{{color:{pair[i]}}}" for name, pair in pairs.items()) for i in (0, 1))
    return f"{light}\n@media (prefers-color-scheme:dark){{{dark}}}"
