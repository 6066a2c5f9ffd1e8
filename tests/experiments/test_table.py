"""Our figures beside the paper's, and the page made of them."""

import json
from pathlib import Path

import pytest

from optg.experiments import record, results
from optg.experiments.cost import Cost
from optg.experiments.declaration import Choice, key_of, load
from optg.experiments.table import lines, texts
from tests.experiments.known import summary

ROOT = Path(__file__).parents[2]


def known(*summaries):
    return {key_of(s): s for s in summaries}


def test_mean_deviation_and_difference():
    experiment = load("cifar", Choice(on=("cifar10",), only=("optg",), columns=("95",), seeds=(0, 1, 2)))
    runs = experiment.runs
    found = known(*(summary(run, accuracy=a) for run, a in zip(runs, (0.93, 0.94, 0.95))))
    [line] = lines(experiment, found)
    assert line.accuracy == pytest.approx(94) and line.deviation == pytest.approx(1)
    assert line.difference == pytest.approx(94 - 93.79)
    assert texts(line)[3:7] == ["94.00 ± 1.00", "93.79", "+0.21", "95.00 %"]
    [line] = lines(experiment, known(summary(runs[1], accuracy=0.93)))
    assert texts(line)[3:6] == ["93.00", "93.79", "-0.79"] and line.deviation is None
    [line] = lines(experiment, {})
    assert texts(line)[3:6] == ["", "93.79", ""]


def test_a_difference_is_from_the_papers_own_sparsity():
    experiment = load("mobilenet", Choice(on=("imagenet",), only=("gmp",), columns=("90",)))
    [[ours], [theirs]] = [
        [line.difference for line in lines(experiment, known(summary(experiment.runs[0], sparsity=sparsity, accuracy=0.62)))]
        for sparsity in (0.9, 0.8903)
    ]
    assert ours is None and theirs == pytest.approx(62 - 61.80)  # which is at 89.03 %


def test_of_runs_that_find_their_own_sparsity_the_nearest_counts_if_it_is_near():
    experiment = load("extreme", Choice(only=("str",)))
    runs = experiment.runs
    assert len(runs) == 5  # the same runs for all columns
    found = known(*(summary(run, sparsity=s) for run, s in zip(runs, (0.96, 0.985, 0.992))))
    shown = {line.cell.column: [s["sparsity"] for s in line.summaries] for line in lines(experiment, found)}
    assert shown == {"98": [0.985], "99": [0.992], "99.5": [0.992]}
    experiment = load("cifar", Choice(on=("cifar10",), only=("str",)))
    found = known(summary(experiment.runs[0], sparsity=0.9494))
    differences = {line.cell.column: texts(line)[5] for line in lines(experiment, found)}
    assert differences["95"] and not differences["90"]  # the run stands in both, but only one is the paper's sparsity
    experiment = load("extreme", Choice(only=("str",)))
    found = known(*(summary(run, sparsity=0.9) for run in runs))
    assert not any(line.summaries for line in lines(experiment, found))
    assert {texts(line)[6] for line in lines(experiment, found)} == {"too far: 90.00 %"}


def test_the_page_is_that_of_the_records():
    assert (ROOT / "RESULTS.md").read_text() == results.page(ROOT / "results")


def test_the_page_says_all_of_a_run_and_nothing_that_no_run_said(tmp_path):
    folder = tmp_path / "results"
    run = load("cifar", Choice(on=("cifar100",), only=("snip",), columns=("95",))).runs[0]
    stranger = summary(run, settings={**summary(run)["settings"], "epochs": 3}, accuracy=0.12345)
    record.append(folder / "a.jsonl", summary(run, accuracy=0.7, seconds=1234.5))
    record.append(folder / "b.jsonl", stranger)
    results.write(tmp_path / "RESULTS.md")
    page = (tmp_path / "RESULTS.md").read_text()
    row = next(line for line in page.splitlines() if line.startswith("| snip"))
    assert row == "| snip | 95 % | 70.00 | 71.83 | -1.83 | 95.00 % | 25.0 | 0 | 1,234 |"
    assert "a GPU, torch 2.11" in page and run.recipe in page and "batch size" in page
    assert "## Other runs" in page and "12.3" in page and "3 epochs" in page
    assert "--method snip --sparsity 0.95 --seed 0 --epochs 3\n" in page
    assert "Not run yet: `earlier-recipe`, `extreme`" in page


def test_a_setting_that_came_less_near_is_among_the_other_runs(tmp_path):
    runs = load("extreme", Choice(only=("str",), columns=("98",))).runs
    for run, sparsity, accuracy in zip(runs, (0.96, 0.979), (0.61, 0.62)):
        record.append(tmp_path / "a.jsonl", summary(run, sparsity=sparsity, accuracy=accuracy))
    tables, _, others = results.page(tmp_path).partition("## Other runs")
    assert "| 62.00 |" in tables and "61.00" not in tables and "| 61.00 |" in others and "62.00" not in others


def test_a_run_with_two_figures_is_refused_and_one_of_another_time_is_shown(tmp_path):
    folder = tmp_path / "results"
    run = load("cifar", Choice(on=("cifar100",), only=("snip",), columns=("95",))).runs[0]
    strange = summary(run, method="forgotten", options={"power": 3}, command="optg train --method forgotten")
    record.append(folder / "a.jsonl", summary(run, accuracy=0.7))
    record.append(folder / "b.jsonl", summary(run, accuracy=0.7))
    record.append(folder / "b.jsonl", strange)
    assert "\noptg train --method forgotten\n" in results.page(folder)
    (folder / "c.jsonl").write_text(json.dumps(summary(run, accuracy=0.6)) + "\n")
    with pytest.raises(ValueError, match=r"c\.jsonl has a run that is there already, with accuracy 0.7 instead of 0.6"):
        results.page(folder)


def test_no_folder_of_records_is_named(tmp_path):
    with pytest.raises(ValueError, match="results is not a folder"):
        results.write(tmp_path / "RESULTS.md")


def test_cost_is_that_of_what_is_most_alike():
    optg, gmp = (load("extreme", Choice(only=(m,), seeds=(0,), columns=("99",))).runs[0] for m in ("optg", "gmp"))
    cost = Cost([summary(optg, seconds=80.0), summary(gmp, seconds=160.0)])
    assert cost.of(optg) == 80 and cost.of(gmp) == 160
    rigl = load("extreme", Choice(only=("rigl",))).runs[0]
    assert cost.of(rigl) == 120  # the mean, for another method of the same model
    assert cost.of(load("resnet50").runs[0]) is None and cost.text([optg, load("resnet50").runs[0]]) == "unknown"
    assert cost.text([optg, rigl]) == f"{200 / 3600:.1f}"
    assert cost.of(load("supermasks", Choice(only=("trained weights",))).runs[-1]) == 120  # by the model it starts from


def test_figures_are_drawn_of_what_there_is(tmp_path):
    from optg.experiments.drawing import draw_accuracy, draw_schedules

    experiment = load("accuracy-sparsity", Choice(only=("optg", "gmp")))
    assert draw_accuracy(experiment, {}, tmp_path) is None
    found = known(*(summary(run, accuracy=0.9 - i / 100) for i, run in enumerate(experiment.runs)))
    for path in (draw_accuracy(experiment, found, tmp_path), draw_schedules(load("schedules").curves, tmp_path)):
        assert path.stat().st_size > 10_000
