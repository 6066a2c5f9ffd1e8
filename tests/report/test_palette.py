import itertools
import math

import pytest

from optg.report.palette import COLOURS, FIXED, PAGE, PAIRS, QUIET, TEXT, VARIABLES, choose_looks


def luminance(colour: str) -> float:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    return sum(
        weight * (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4)
        for weight, c in zip((0.2126, 0.7152, 0.0722), parts)
    )


def contrast(a: str, b: str) -> float:
    dark, light = sorted((luminance(a), luminance(b)))
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("page", [0, 1])
def test_colours_contrast_with_light_and_dark_pages(page):
    assert all(contrast(pair[page], PAGE[page]) >= 3 for pair in COLOURS)  # WCAG: figures
    assert all(contrast(pair[page], PAGE[page]) >= 4.5 for pair in (TEXT, QUIET))  # WCAG: text


# Linear sRGB as seen without red, green or blue cones: Machado et al. 2009
SEEN = {
    "all": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "no red": ((0.152, 1.053, -0.205), (0.115, 0.786, 0.099), (-0.004, -0.048, 1.052)),
    "no green": ((0.367, 0.861, -0.228), (0.280, 0.673, 0.047), (-0.012, 0.043, 0.969)),
    "no blue": ((1.256, -0.077, -0.179), (-0.078, 0.931, 0.148), (0.005, 0.691, 0.304)),
}


def perceived(colour: str, seen: tuple) -> tuple[float, float, float]:
    """Return OKLab coordinates, in which distances match perception."""
    rgb = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    rgb = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in rgb]
    r, g, b = (min(max(sum(m * c for m, c in zip(row, rgb)), 0), 1) for row in seen)
    rows = ((0.4122, 0.5363, 0.0514), (0.2119, 0.6807, 0.1074), (0.0883, 0.2817, 0.6300))
    x, y, z = (math.cbrt(m[0] * r + m[1] * g + m[2] * b) for m in rows)
    return (
        0.2105 * x + 0.7936 * y - 0.0041 * z,
        1.9780 * x - 2.4286 * y + 0.4506 * z,
        0.0259 * x + 0.7828 * y - 0.8087 * z,
    )


@pytest.mark.parametrize("page", [0, 1])
@pytest.mark.parametrize("seen", SEEN.values(), ids=SEEN)
def test_colours_differ_for_colour_blind_readers(page, seen):
    places = [perceived(pair[page], seen) for pair in COLOURS]
    assert min(math.dist(a, b) for a, b in itertools.combinations(places, 2)) > 0.06


def test_a_method_keeps_its_colour_on_every_page():
    assert choose_looks(["optg"])["optg"] == choose_looks([*FIXED, "feather", "dense"])["optg"]
    assert choose_looks(["gmp", "optg"], ["rigl"])["gmp"] == choose_looks(["gmp"])["gmp"]


def test_twenty_methods_all_look_different():
    from optg.methods import METHODS

    found = choose_looks(METHODS)
    assert set(found) == set(METHODS) and len(set(found.values())) == len(METHODS)
    assert sum(look.colour == found["optg"].colour for look in found.values()) == 1  # no other method has OptG's colour


def test_our_methods_choose_colours_before_methods_of_the_paper():
    found = choose_looks(["feather"], FIXED)
    assert found["feather"].dash == () and found["feather"].colour == COLOURS[0][0]


def test_every_light_colour_is_unique_so_that_svg_can_replace_it():
    assert len(VARIABLES) == len(PAIRS)
