import itertools
import math
import xml.etree.ElementTree as xml

import made
import pytest

from optg.report import figures, scatter
from optg.report.axes import linear, logarithmic, sparsities
from optg.report.markup import brief, compact, duration, signed, slug, text
from optg.report.palette import COLOURS, PAGE, QUIET, TEXT, USUAL, looks
from optg.report.paper import table_of, tables
from optg.report.plot import alone
from optg.report.runs import group, read_all


def made_group(path):
    ((where, runs),) = group(read_all([path])).items()
    return figures.make_group(*where, runs)


@pytest.mark.parametrize(
    "axis, written",
    [
        (linear("", [91.2, 93.7]), ["91.0", "91.5", "92.0", "92.5", "93.0", "93.5", "94.0"]),
        (linear("", [], low=0, high=160), ["0", "50", "100", "150"]),
        (linear("", [72.0]), ["71.0", "71.5", "72.0", "72.5", "73.0"]),
        (linear("", [1e-30, 4e-28], low=0), ["0", "1e-28", "2e-28", "3e-28", "4e-28"]),
        (linear("", [5e-324], low=0), ["0.000", "0.005", "0.010"]),
        (linear("", [0.0], low=0), ["0.000", "0.005", "0.010"]),
        (logarithmic("", [0.004, 2.3]), ["0.01", "0.1", "1"]),
        (logarithmic("", [2e6, 4e8], brief), ["3M", "10M", "30M", "100M", "300M"]),
        (logarithmic("", [0, 3, 40], brief, zero=True), ["0", "2", "5", "10", "20", "50"]),
        (sparsities("", [0.0, 0.9, 0.95, 0.99]), ["0", "50", "80", "90", "95", "98", "99"]),
        (sparsities("", [0.98, 0.99, 0.995]), ["98", "99", "99.5"]),
    ],
)
def test_ticks(axis, written):
    assert [label for _, label in axis.ticks] == written
    assert all(-1e-9 <= place <= 1 + 1e-9 for place, _ in axis.ticks)


def test_zero_stands_at_the_foot_of_a_logarithmic_axis():
    axis = logarithmic("", [0, 10, 1000], zero=True)
    assert axis.place(0) == 0 < axis.place(10) < axis.place(1000) == 1


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
def test_colours_stand_out_from_a_light_and_a_dark_page(page):
    assert all(contrast(pair[page], PAGE[page]) >= 3 for pair in COLOURS)  # WCAG: figures
    assert all(contrast(pair[page], PAGE[page]) >= 4.5 for pair in (TEXT, QUIET))  # WCAG: text


# sRGB, linear, as people without red, green or blue cones see it: Machado et al. 2009
SEEN = {
    "all": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "no red": ((0.152, 1.053, -0.205), (0.115, 0.786, 0.099), (-0.004, -0.048, 1.052)),
    "no green": ((0.367, 0.861, -0.228), (0.280, 0.673, 0.047), (-0.012, 0.043, 0.969)),
    "no blue": ((1.256, -0.077, -0.179), (-0.078, 0.931, 0.148), (0.005, 0.691, 0.304)),
}


def perceived(colour: str, seen: tuple) -> tuple[float, float, float]:
    """OKLab: there, distances are as they are felt."""
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
def test_colours_stay_apart_for_all_eyes(page, seen):
    places = [perceived(pair[page], seen) for pair in COLOURS]
    assert min(math.dist(a, b) for a, b in itertools.combinations(places, 2)) > 0.06


def test_a_method_keeps_its_colour_whatever_is_beside_it():
    assert looks(["optg"])["optg"] == looks([*USUAL, "feather", "dense"])["optg"]
    assert looks(["gmp", "optg"], ["rigl"])["gmp"] == looks(["gmp"])["gmp"]


def test_twenty_methods_all_look_different():
    from optg.methods import METHODS

    found = looks(METHODS)
    assert set(found) == set(METHODS) and len(set(found.values())) == len(METHODS)
    assert sum(look.colour == found["optg"].colour for look in found.values()) == 1  # OptG shares its colour with none


def test_our_methods_choose_their_colours_before_the_papers():
    found = looks(["feather"], USUAL)
    assert found["feather"].dash == "" and found["feather"].colour == "c0"


def test_curves_stand_where_the_metrics_say(tmp_path):
    made.run(tmp_path / "a", "optg")
    made.run(tmp_path / "b", "gmp", ended=False)
    shown = made_group(tmp_path)
    by_label = {series.label.split()[0]: series.points for series in figures.sparsity(shown).series}
    assert by_label["optg"][-1] == (12, 95.0) and by_label["gmp"][-1] == (6, 47.5)
    assert [series.label.split()[0] for series in figures.mask_rate(shown).series] == ["optg"]
    assert [len(figures.late_accuracy(shown).series), len(figures.accuracy(shown).series)] == [1, 2]
    made.run(tmp_path / "c", "rigl", epochs=40)
    late = {series.label.split()[0]: series.points for series in figures.late_accuracy(made_group(tmp_path)).series}
    assert [late["optg"][i][0] for i in (0, -1)] == [75, 100] and len(late["optg"]) == 4
    assert [late["rigl"][i][0] for i in (0, -1)] == [75, 100] and len(late["rigl"]) == 11


def test_runs_beside_the_papers_points(tmp_path):
    made.run(tmp_path / "a", "optg", 0.931, sparsity=0.9)
    made.run(tmp_path / "b", "optg", 0.928, sparsity=0.95)
    made.run(tmp_path / "c", "gmp", math.nan)
    made.run(tmp_path / "d", "rigl", ended=False)
    figure = scatter.against_sparsity(made_group(tmp_path))
    ours = [series for series in figure.series if not series.look.hollow]
    assert [(s.label, s.points) for s in ours] == 2 * [("optg", [(0.9, pytest.approx(93.1)), (0.95, pytest.approx(92.8))])]
    theirs = {series.label.replace("\N{NO-BREAK SPACE}", " ") for series in figure.series if series.look.hollow}
    assert len(theirs) == 19 and "paper, optg 95 %: 93.79 %" in theirs
    flops = scatter.against_flops(made_group(tmp_path))
    assert all(not series.look.hollow for series in flops.series)  # Tab. 1 gives no FLOPs


def test_lines_join_only_runs_that_differ_in_sparsity_and_seed_alone(tmp_path):
    for i, (sparsity, seed, lr) in enumerate(((0.9, 0, 0.1), (0.9, 1, 0.1), (0.98, 0, 0.1), (0.98, 0, 0.2))):
        made.run(tmp_path / str(i), "gmp", 0.9 + 0.02 * i, sparsity=sparsity, seed=seed, lr=lr)
    figure = scatter.against_sparsity(made_group(tmp_path))
    lines = [series.points for series in figure.series if series.line]
    assert lines == [[(pytest.approx(0.9), pytest.approx(91.0)), (0.98, pytest.approx(94.0))]]


def test_a_run_that_collapsed_is_named_and_leaves_the_others_room(tmp_path):
    for i, accuracy in enumerate((0.93, 0.92, 0.925, 0.1)):
        made.run(tmp_path / str(i), "gmp", accuracy, seed=i, data="digits")
    figure = scatter.against_sparsity(made_group(tmp_path))
    assert [label.replace("\N{NO-BREAK SPACE}", " ") for label in figure.below] == ["gmp 95 %, seed 3 (10.00 %)"]
    assert figure.y.ticks[0][1] == "92.0" and not figure.missing
    words = " ".join(xml.fromstring(alone(figure)).itertext()).replace("\N{NO-BREAK SPACE}", " ")
    assert "Not drawn, far below the others: gmp 95 %, seed 3 (10.00 %)." in words


def test_a_line_goes_through_the_mean_of_all_seeds_those_that_collapsed_too(tmp_path):
    for i, (sparsity, accuracy) in enumerate(((0.9, 0.93), (0.9, 0.92), (0.9, 0.925), (0.95, 0.92), (0.95, 0.93), (0.95, 0.4))):
        made.run(tmp_path / str(i), "gmp", accuracy, sparsity=sparsity, seed=i % 3, data="digits")
    figure = scatter.against_sparsity(made_group(tmp_path))
    [line] = [series.points for series in figure.series if series.line]
    assert len(figure.below) == 1 and line == [pytest.approx((0.9, 92.5)), pytest.approx((0.95, 75.0))]
    made.run(tmp_path / "6", "gmp", 0.05, sparsity=0.99, data="digits")  # whose mean is not drawn either
    [again] = [series.points for series in scatter.against_sparsity(made_group(tmp_path)).series if series.line]
    assert again == line


def test_legends_name_methods_where_there_are_many_runs(tmp_path):
    shown = made_group(made.forty(tmp_path))
    assert [label for label, *_ in figures.accuracy(shown).legend][:3] == ["dense", "optg", "gmp"]
    assert len(figures.accuracy(shown).legend) == 10 and len(figures.accuracy(shown).series) == 40


def test_a_file_of_a_figure_is_xml_with_title_and_legend(tmp_path):
    made.run(tmp_path / "<b>&\x01", "optg", model="a:<i>", epochs=20)
    made.run(tmp_path / "b", "optg", model="a:<i>", epochs=20)
    parsed = xml.fromstring(alone(figures.accuracy(made_group(tmp_path))))
    words = ["".join(element.itertext()) for element in parsed.iter("{http://www.w3.org/2000/svg}text")]
    assert "Test accuracy" in words and sum("<b>&�" in word for word in words) == 1
    assert not list(parsed.iter("script"))


def test_the_papers_tables():
    assert [(t.name, t.data, len(t.points)) for t in tables()] == [
        ("Tab. 1", "cifar10", 19),
        ("Tab. 1", "cifar100", 19),
        ("Tab. 2", "imagenet", 32),
        ("Tab. 3", "imagenet", 10),
    ]
    resnet = table_of("resnet50", "imagenet")
    assert resnet.at("optg", 0.98).accuracy == 0.672 and resnet.at("optg", 0.98).flops == 126e6
    assert resnet.at("str", 0.99).sparsity == 0.9898  # the nearest, but for rounding
    assert resnet.at("optg", 0.97) is None and resnet.at("feather", 0.9) is None and resnet.at("dense", 0.0).accuracy == 0.7701
    assert table_of("vgg19-maxpool", "cifar10") is table_of("vgg19", "cifar10") and table_of("vgg19", "digits") is None


def test_words():
    assert [compact(v) for v in (0, 999, 1001718, 17451622, 398136320, 4.09e9, None, math.nan)] == [
        "0", "999", "1.00 M", "17.5 M", "398 M", "4.09 G", "–", "–",
    ]  # fmt: skip
    assert [duration(v) for v in (4.25, 59.96, 151.8, 3 * 3600 + 62)] == ["4.2 s", "1 min 00 s", "2 min 32 s", "3 h 01 min"]
    assert signed(-0.0111) == "−1.11" and signed(0.001) == "+0.10" and signed(None) == "–"
    assert text("<a href='x'>\x1b\udcff") == "&lt;a href=&#x27;x&#x27;&gt;��" and slug("../../x: <y>") == "x-y"
