"""Means over seeds, and our accuracies beside the paper's."""

import pytest

from optg.experiments.cell_results import collect_results, format_result, pooled_deviation
from optg.experiments.declaration import Selection, load_experiment
from tests.experiments.fake_summaries import by_key, fake_summary


def test_mean_deviation_and_difference():
    experiment = load_experiment("cifar", Selection(on=("cifar10",), only=("optg",), columns=("95",), seeds=(0, 1, 2)))
    runs = experiment.runs
    found = by_key(*(fake_summary(run, accuracy=a) for run, a in zip(runs, (0.93, 0.94, 0.95))))
    [result] = collect_results(experiment, found)
    assert result.accuracy == pytest.approx(94) and result.deviation == pytest.approx(1)
    assert result.difference == pytest.approx(94 - 93.79)
    assert format_result(result)[3:7] == ["94.00 ± 1.00", "93.79", "+0.21", "95.00 %"]
    [result] = collect_results(experiment, by_key(fake_summary(runs[1], accuracy=0.93)))
    assert format_result(result)[3:6] == ["93.00", "93.79", "-0.79"] and result.deviation is None
    [result] = collect_results(experiment, {})
    assert format_result(result)[3:6] == ["", "93.79", ""]


def test_the_deviation_is_pooled_over_cells_with_several_seeds():
    experiment = load_experiment("phoenix", Selection(only=("gmp", "optg", "acdc"), columns=("99",)))
    accuracies = {"gmp": (0.70, 0.71, 0.72), "optg": (0.70, 0.74), "acdc": (0.1,)}  # variances 1 and 8 with 2 and 1 degrees
    found = by_key(*(
        fake_summary(run, accuracy=accuracy)
        for cell in experiment.cells
        for run, accuracy in zip(cell.runs, accuracies.get(cell.row, ()))
    ))  # fmt: skip
    results = collect_results(experiment, found)
    assert pooled_deviation(results) == pytest.approx(((2 * 1 + 1 * 8) / 3) ** 0.5)
    assert pooled_deviation([result for result in results if len(result.summaries) < 2]) is None


def test_flops_after_shrinking_and_of_the_training_are_shown_where_recorded():
    experiment = load_experiment("structures", Selection(only=("gmp",), columns=("channel, 70 %",)))
    [run] = experiment.runs
    both = {"shrunk": {"parameters": 10, "flops": 12_000_000}, "training_flops": 2_500_000_000_000_000}
    [result] = collect_results(experiment, by_key(fake_summary(run, **both)))
    assert format_result(result)[7:9] == ["25.0 (12.0 shrunk)", "2.50"]
    [result] = collect_results(experiment, by_key(fake_summary(run)))
    assert format_result(result)[7:9] == ["25.0", ""]


def test_runs_with_a_validation_split_count_by_it():
    experiment = load_experiment("phoenix-ideas", Selection(only=("θ 1",), columns=("99",)))
    [run] = experiment.runs
    found = by_key(fake_summary(run, accuracy=0.7, validation={"images": 5000, "accuracy": 0.6, "loss": 1.0}))
    assert run.plan.recipe.validate and [r.accuracy for r in collect_results(experiment, found)] == [60.0]


def test_a_difference_needs_the_same_sparsity_as_the_papers():
    experiment = load_experiment("mobilenet", Selection(on=("imagenet",), only=("gmp",), columns=("90",)))

    def difference(sparsity):
        found = by_key(fake_summary(experiment.runs[0], sparsity=sparsity, accuracy=0.62))
        [result] = collect_results(experiment, found)
        return result.difference

    assert difference(0.9) is None and difference(0.8903) == pytest.approx(62 - 61.80)  # the paper's is at 89.03 %


def test_the_run_closest_to_the_target_sparsity_counts_if_it_is_close_enough():
    experiment = load_experiment("extreme", Selection(only=("str",)))
    runs = experiment.runs
    assert len(runs) == 5  # the same runs for all columns
    found = by_key(*(fake_summary(run, sparsity=s) for run, s in zip(runs, (0.96, 0.985, 0.992))))
    shown = {result.cell.column: [s["sparsity"] for s in result.summaries] for result in collect_results(experiment, found)}
    assert shown == {"98": [0.985], "99": [0.992], "99.5": [0.992]}
    experiment = load_experiment("cifar", Selection(on=("cifar10",), only=("str",)))
    found = by_key(fake_summary(experiment.runs[0], sparsity=0.9494))
    differences = {result.cell.column: format_result(result)[5] for result in collect_results(experiment, found)}
    assert differences["95"] and not differences["90"]  # the run is shown in both cells, but only one has the paper's sparsity
    experiment = load_experiment("extreme", Selection(only=("str",)))
    found = by_key(*(fake_summary(run, sparsity=0.9) for run in runs))
    assert not any(result.summaries for result in collect_results(experiment, found))
    assert {format_result(result)[6] for result in collect_results(experiment, found)} == {"too far: 90.00 %"}
