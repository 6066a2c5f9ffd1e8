"""RESULTS.md, generated from record files."""

import json
from pathlib import Path

import pytest

from optg.experiments.declaration import Selection, load_experiment
from optg.experiments.records import append_record
from optg.experiments.results_page import results_page, write_results_page
from tests.experiments.fake_summaries import fake_summary

ROOT = Path(__file__).parents[2]


def test_the_committed_page_is_generated_from_the_records():
    assert (ROOT / "RESULTS.md").read_text() == results_page(ROOT / "results")


def test_the_page_shows_every_recorded_run_and_nothing_else(tmp_path):
    folder = tmp_path / "results"
    run = load_experiment("cifar", Selection(on=("cifar100",), only=("snip",), columns=("95",))).runs[0]
    other = fake_summary(run, settings={**fake_summary(run)["settings"], "epochs": 3}, accuracy=0.12345)
    append_record(folder / "a.jsonl", fake_summary(run, accuracy=0.7, seconds=1234.5))
    append_record(folder / "b.jsonl", other)
    write_results_page(tmp_path / "RESULTS.md")
    page = (tmp_path / "RESULTS.md").read_text()
    row = next(line for line in page.splitlines() if line.startswith("| snip"))
    assert row == "| snip | 95 % | 70.00 | 71.83 | -1.83 | 95.00 % | 25.0 | 0 | 1,234 |"
    assert "a GPU, torch 2.11" in page and run.recipe in page and "batch size" in page
    assert "## Other runs" in page and "12.3" in page and "3 epochs" in page
    assert "--method snip --sparsity 0.95 --seed 0 --epochs 3\n" in page
    assert "Not run yet: `earlier-recipe`, `extreme`" in page


def test_the_page_states_the_smallest_difference_that_counts(tmp_path):
    runs = load_experiment("phoenix", Selection(only=("gmp",), columns=("99",))).runs
    for run, accuracy in zip(runs, (0.70, 0.71, 0.72), strict=True):
        append_record(tmp_path / "a.jsonl", fake_summary(run, accuracy=accuracy))
    expected = "pooled over the cells: 1.00. Two standard errors of the difference between two means of 3 seeds: 1.63."
    assert expected in results_page(tmp_path)


def test_an_alternative_further_from_the_target_is_among_the_other_runs(tmp_path):
    runs = load_experiment("extreme", Selection(only=("str",), columns=("98",))).runs
    for run, sparsity, accuracy in zip(runs, (0.96, 0.979), (0.61, 0.62)):
        append_record(tmp_path / "a.jsonl", fake_summary(run, sparsity=sparsity, accuracy=accuracy))
    tables, _, others = results_page(tmp_path).partition("## Other runs")
    assert "| 62.00 |" in tables and "61.00" not in tables and "| 61.00 |" in others and "62.00" not in others


def test_two_accuracies_of_one_run_are_refused_and_an_unknown_method_is_shown(tmp_path):
    folder = tmp_path / "results"
    run = load_experiment("cifar", Selection(on=("cifar100",), only=("snip",), columns=("95",))).runs[0]
    unknown = fake_summary(run, method="forgotten", options={"power": 3}, command="optg train --method forgotten")
    append_record(folder / "a.jsonl", fake_summary(run, accuracy=0.7))
    append_record(folder / "b.jsonl", fake_summary(run, accuracy=0.7))
    append_record(folder / "b.jsonl", unknown)
    assert "\noptg train --method forgotten\n" in results_page(folder)
    (folder / "c.jsonl").write_text(json.dumps(fake_summary(run, accuracy=0.6)) + "\n")
    with pytest.raises(ValueError, match=r"c\.jsonl has a run with accuracy 0.6 that is already recorded with 0.7"):
        results_page(folder)


def test_a_missing_results_folder_is_refused(tmp_path):
    with pytest.raises(ValueError, match="results is not a folder"):
        write_results_page(tmp_path / "RESULTS.md")
