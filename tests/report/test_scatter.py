import math
import xml.etree.ElementTree as ElementTree

import pytest

from optg.report import scatter
from optg.report.plot import file_svg
from tests.report.fake_runs import read_group, write_run


def test_runs_and_results_of_the_paper(tmp_path):
    write_run(tmp_path / "a", "optg", 0.931, sparsity=0.9)
    write_run(tmp_path / "b", "optg", 0.928, sparsity=0.95)
    write_run(tmp_path / "c", "gmp", math.nan)
    write_run(tmp_path / "d", "rigl", finished=False)
    plot = scatter.against_sparsity(read_group(tmp_path))
    ours = [series for series in plot.series if not series.look.hollow]
    assert [(s.label, s.points) for s in ours] == 2 * [("optg", [(0.9, pytest.approx(93.1)), (0.95, pytest.approx(92.8))])]
    papers = {series.label.replace("\N{NO-BREAK SPACE}", " ") for series in plot.series if series.look.hollow}
    assert len(papers) == 19 and "paper, optg 95 %: 93.79 %" in papers
    flops = scatter.against_flops(read_group(tmp_path))
    assert all(not series.look.hollow for series in flops.series)  # Tab. 1 gives no FLOPs


def test_lines_join_only_runs_that_differ_in_sparsity_and_seed(tmp_path):
    for i, (sparsity, seed, lr) in enumerate(((0.9, 0, 0.1), (0.9, 1, 0.1), (0.98, 0, 0.1), (0.98, 0, 0.2))):
        write_run(tmp_path / str(i), "gmp", 0.9 + 0.02 * i, sparsity=sparsity, seed=seed, lr=lr)
    plot = scatter.against_sparsity(read_group(tmp_path))
    lines = [series.points for series in plot.series if series.line]
    assert lines == [[(pytest.approx(0.9), pytest.approx(91.0)), (0.98, pytest.approx(94.0))]]


def test_a_collapsed_run_is_named_instead_of_drawn(tmp_path):
    for i, accuracy in enumerate((0.93, 0.92, 0.925, 0.1)):
        write_run(tmp_path / str(i), "gmp", accuracy, seed=i, data="digits")
    plot = scatter.against_sparsity(read_group(tmp_path))
    assert [label.replace("\N{NO-BREAK SPACE}", " ") for label in plot.below] == ["gmp 95 %, seed 3 (10.00 %)"]
    assert next(iter(plot.y.ticks.values())) == "92.0" and not plot.missing
    words = " ".join(ElementTree.fromstring(file_svg(plot)).itertext()).replace("\N{NO-BREAK SPACE}", " ")
    assert "Not drawn because far below the others: gmp 95 %, seed 3 (10.00 %)." in words


def test_a_line_goes_through_the_mean_of_all_seeds_including_collapsed_ones(tmp_path):
    for i, (sparsity, accuracy) in enumerate(((0.9, 0.93), (0.9, 0.92), (0.9, 0.925), (0.95, 0.92), (0.95, 0.93), (0.95, 0.4))):
        write_run(tmp_path / str(i), "gmp", accuracy, sparsity=sparsity, seed=i % 3, data="digits")
    plot = scatter.against_sparsity(read_group(tmp_path))
    [line] = [series.points for series in plot.series if series.line]
    assert len(plot.below) == 1 and line == [pytest.approx((0.9, 92.5)), pytest.approx((0.95, 75.0))]
    write_run(tmp_path / "6", "gmp", 0.05, sparsity=0.99, data="digits")  # its mean is not drawn either
    [again] = [series.points for series in scatter.against_sparsity(read_group(tmp_path)).series if series.line]
    assert again == line
