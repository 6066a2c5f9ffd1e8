"""The page in a real browser: it fits a phone, fetches nothing, and its figures are legible in light and dark mode."""

import pytest

from optg.report import write
from tests.report import browser
from tests.report.fake_runs import write_forty_runs, write_run

pytestmark = pytest.mark.skipif(not browser.find_chromium(), reason="no Chromium")

# Elements that are wider than the page, outside of boxes that scroll.
TOO_WIDE = """[...document.querySelectorAll('body *')].filter(e => !e.closest('.scroll *') && !e.closest('svg *')
    && e.getBoundingClientRect().right > innerWidth + 0.5).map(e => e.outerHTML.slice(0, 80))"""
# Number of texts in figures, their lowest contrast with the page (WCAG), their smallest size, and the luminance of the page.
WORDS = """(() => {
    const light = c => c.match(/[\\d.]+/g).slice(0, 3).map(v => v / 255)
        .map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
        .reduce((sum, v, i) => sum + v * [.2126, .7152, .0722][i], 0);
    const page = light(getComputedStyle(document.body).backgroundColor);
    const words = [...document.querySelectorAll('figure svg text')];
    const contrast = words.map(e => light(getComputedStyle(e).fill))
        .map(l => (Math.max(l, page) + .05) / (Math.min(l, page) + .05));
    const scale = words.map(e => e.getScreenCTM().a * parseFloat(getComputedStyle(e).fontSize));
    return [words.length, Math.min(...contrast), Math.min(...scale), page];
})()"""
# Texts of one figure that overlap.
OVERLAPS = """[...document.querySelectorAll('figure > svg')].flatMap(svg => {
    const boxes = [...svg.querySelectorAll('text')].map(e => [e.textContent, e.getBoundingClientRect()]);
    return boxes.flatMap(([a, p], i) => boxes.slice(i + 1).filter(([b, q]) =>
        p.left < q.right && q.left < p.right && p.top + 2 < q.bottom && q.top + 2 < p.bottom)
        .map(([b]) => [svg.ariaLabel, a, b]));
})"""

# Colours of a figure file: of its title, and of the first path, which is its background.
TITLE_AND_BACKGROUND = """(() => {
    const title = [...document.querySelectorAll('text')].find(e => e.textContent == 'Test accuracy');
    return [title, document.querySelector('path')].map(e => getComputedStyle(e).fill);
})()"""


@pytest.fixture(scope="module")
def chromium():
    with browser.started() as started:
        yield started


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """Pages of one run, of twelve runs on three datasets, and of forty runs with long and hostile names."""
    here = tmp_path_factory.mktemp("pages")
    write_run(here / "one" / "run", epochs=160)
    for i, method in enumerate(
        ("dense", "optg", "gmp", "rigl", "set", "granet", "str", "snip", "grasp", "synflow", "dpf", "feather")
    ):
        data = ("cifar10", "cifar100", "my.package:" + "data" * 30)[i % 3]
        write_run(here / "twelve" / method, method, 0.9, data=data, finished=i % 4 > 0, old=i > 9)
    write_forty_runs(here / "forty")
    return {name: write([here / name], here / "out" / name, f"A title {'w' * 60}") for name in ("one", "twelve", "forty")}


@pytest.mark.parametrize("width", [360, 1280])
@pytest.mark.parametrize("name", ["one", "twelve", "forty"])
def test_the_page_fits_the_width_and_fetches_nothing(chromium, pages, name, width):
    chromium.open(pages[name], width)
    assert chromium.evaluate("document.documentElement.scrollWidth") == chromium.evaluate("innerWidth") == width
    assert chromium.evaluate(TOO_WIDE) == []
    assert chromium.requests == [pages[name].as_uri()]


@pytest.mark.parametrize("dark", [False, True])
def test_figures_are_legible_in_light_and_dark_mode(chromium, pages, dark):
    chromium.open(pages["twelve"], 360, dark)
    count, contrast, size, page = chromium.evaluate(WORDS)
    assert count > 100 and contrast > 4.5 and size > 9 and (page < 0.1) is dark
    assert chromium.evaluate(OVERLAPS) == []


def test_all_sections_exist_and_are_linked(chromium, pages):
    chromium.open(pages["twelve"], 1280)
    titles = chromium.evaluate("[...document.querySelectorAll('h2')].map(e => e.textContent)")
    assert titles[-1] == "Commands and versions" and len(titles) == 4
    links = chromium.evaluate(
        "[...document.querySelectorAll('nav a')].map(a => document.querySelector(`[id='${a.hash.slice(1)}']`) !== null)"
    )
    assert links == [True] * 4
    boxes = chromium.evaluate(
        "[...document.querySelectorAll('figure > svg')].map(e => e.getBoundingClientRect()).map(b => [b.width, b.height])"
    )
    assert len(boxes) > 20 and min(min(box) for box in boxes) > 150


def test_a_figure_file_follows_light_and_dark_mode(chromium, pages):
    figure = pages["twelve"].parent / "figures" / "vgg19-on-cifar10-accuracy.svg"
    for dark in (False, True):
        chromium.open(figure, 800, dark)
        text, page = chromium.evaluate(TITLE_AND_BACKGROUND)
        assert (text, page) == (
            ("rgb(228, 231, 234)", "rgb(21, 24, 27)") if dark else ("rgb(28, 33, 38)", "rgb(255, 255, 255)")
        )
