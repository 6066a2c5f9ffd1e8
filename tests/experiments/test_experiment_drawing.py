"""Figures drawn from finished runs."""

from pathlib import Path

from optg.experiments.cell_results import collect_results
from optg.experiments.declaration import Selection, load_experiment
from optg.experiments.drawing import draw_accuracy, draw_schedules, explain_marks, horizontal
from optg.experiments.records import records_in
from tests.experiments.fake_summaries import by_key, fake_summary

ROOT = Path(__file__).parents[2]


def test_figures_are_drawn_from_the_finished_runs(tmp_path):
    experiment = load_experiment("accuracy-sparsity", Selection(only=("optg", "gmp")))
    assert draw_accuracy(experiment, {}, tmp_path / "a.png") is None
    found = by_key(*(fake_summary(run, accuracy=0.9 - i / 100) for i, run in enumerate(experiment.runs)))
    for path in (
        draw_accuracy(experiment, found, tmp_path / "a.png"),
        draw_schedules(load_experiment("schedules").curves, tmp_path),
    ):
        assert path.stat().st_size > 10_000


def test_the_plot_of_recorded_runs_is_small_and_does_not_change(tmp_path):
    experiment = load_experiment("extreme", Selection(only=("optg", "feather", "granet", "gmp", "rigl", "dense")))
    recorded = records_in(ROOT / "results")
    first, second = (draw_accuracy(experiment, recorded, tmp_path / name) for name in ("first.svg", "second.svg"))
    assert first.read_bytes() == second.read_bytes() and first.stat().st_size < 150_000


def test_accuracy_can_be_drawn_against_flops_where_they_were_recorded(tmp_path):
    experiment = load_experiment("extreme", Selection(only=("optg", "gmp", "dense")))
    old = by_key(*map(fake_summary, experiment.runs))
    assert draw_accuracy(experiment, old, tmp_path / "old.svg", "flops")
    assert draw_accuracy(experiment, old, tmp_path / "none.svg", "training-flops") is None
    new = by_key(*({**fake_summary(run), "training_flops": 4 * 10**15} for run in experiment.runs))
    drawn = draw_accuracy(experiment, new, tmp_path / "new.svg", "training-flops")
    assert "<!-- PFLOPs of the whole training, zeros skipped -->" in drawn.read_text()
    [points] = [r for r in collect_results(experiment, new) if r.cell.row == "gmp" and r.cell.column == "99"]
    assert horizontal(points, "training-flops") == 4 and horizontal(points, "flops") == points.mean("flops") / 1e6


def test_the_error_bars_and_crosses_are_explained():
    experiment = load_experiment("extreme", Selection(only=("optg", "gmp"), columns=("99",)))
    [optg, gmp] = collect_results(experiment, by_key(*map(fake_summary, experiment.runs)))
    assert explain_marks([optg, gmp]) == "Error bars: standard deviation over 3 seeds (OptG); other lines: one seed."
    assert explain_marks([optg]) == "Error bars: standard deviation over 3 seeds."
    assert explain_marks([gmp]) == "One seed for each point."
    experiment = load_experiment("cifar", Selection(on=("cifar10",), only=("optg",), columns=("95",)))
    assert explain_marks(collect_results(experiment, {})).endswith("Crosses: the paper's accuracy.")
