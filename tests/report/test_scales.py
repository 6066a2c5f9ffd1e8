import pytest
from matplotlib.figure import Figure

from optg.report.markup import axis_number
from optg.report.scales import Scale, linear, logarithmic, sparsities


def applied(scale: Scale):
    """Return matplotlib axes with this y scale."""
    axes = Figure().add_subplot()
    scale.apply(axes, "y")
    return axes


def height(axes, value: float) -> float:
    """Return where a value is drawn: 0 at the bottom of the axes, 1 at the top."""
    return axes.transAxes.inverted().transform(axes.transData.transform((0.5, value)))[1]


@pytest.mark.parametrize(
    "scale, labels",
    [
        (linear("", [91.2, 93.7]), ["91.0", "91.5", "92.0", "92.5", "93.0", "93.5", "94.0"]),
        (linear("", low=0, high=160), ["0", "50", "100", "150"]),
        (linear("", [72.0]), ["71.0", "71.5", "72.0", "72.5", "73.0"]),
        (linear("", [1e-30, 4e-28], low=0), ["0", "1e-28", "2e-28", "3e-28", "4e-28"]),
        (linear("", [5e-324], low=0), ["0.000", "0.005", "0.010"]),
        (linear("", [0.0], low=0), ["0.000", "0.005", "0.010"]),
        (logarithmic("", [0.004, 2.3]), ["0.01", "0.1", "1"]),
        (logarithmic("", [2e6, 4e8], axis_number), ["3M", "10M", "30M", "100M", "300M"]),
        (logarithmic("", [0, 3, 40], axis_number, zero=True), ["0", "2", "5", "10", "20", "50"]),
        (sparsities("", [0.0, 0.9, 0.95, 0.99]), ["0", "50", "80", "90", "95", "98", "99"]),
        (sparsities("", [0.98, 0.99, 0.995]), ["98", "99", "99.5"]),
    ],
)
def test_ticks(scale, labels):
    axes = applied(scale)
    assert [label.get_text() for label in axes.get_yticklabels()] == labels
    assert all(-1e-9 <= height(axes, tick) <= 1 + 1e-9 for tick in axes.get_yticks())


def test_zero_is_at_the_foot_of_a_logarithmic_scale():
    axes = applied(logarithmic("", [0, 10, 1000], zero=True))
    assert height(axes, 0) == pytest.approx(0) and height(axes, 1000) == pytest.approx(1)
    assert 0 < height(axes, 10) < height(axes, 100) < 1


def test_the_sparsity_scale_is_logarithmic_in_the_density():
    axes = applied(sparsities("", [0.9, 0.999]))
    steps = [height(axes, 0.99) - height(axes, 0.9), height(axes, 0.999) - height(axes, 0.99)]
    assert steps[0] == pytest.approx(steps[1], rel=1e-3)


def test_a_sparsity_of_one_can_be_drawn():
    scale = sparsities("", [0.9, 1.0])
    assert scale.contains(1.0) and 0 < height(applied(scale), 1.0) < 1
