"""A planned run: its command, its folder name and its key."""

import dataclasses

import pytest

from optg.experiments.declaration import Selection, experiment_datasets, experiment_names, load_experiment
from optg.experiments.planned_run import PlannedRun, run_key
from optg.training.arguments import parse_train_args
from optg.training.recipe import build_method
from tests.experiments.fake_summaries import fake_summary


def one_run_of_each_kind() -> list[PlannedRun]:
    """Return a run for each combination of recipe, method and names of changed settings and options."""
    kinds: dict[str, PlannedRun] = {}
    for name in experiment_names():
        for dataset in experiment_datasets(name):
            for run in load_experiment(name, Selection(on=(dataset,), optional_columns=True)).runs:
                settings, options = run.changes
                kinds.setdefault(repr((run.recipe, run.plan.method, sorted(settings), sorted(options))), run)
    return list(kinds.values())


def test_the_command_of_a_run_trains_what_was_planned():
    runs = [run for run in one_run_of_each_kind() if run.starts_from is None]  # the others need the model of another run
    for run in runs:
        plan, _ = parse_train_args(run.arguments[1:])
        settings, options = dataclasses.asdict(plan.recipe), dataclasses.asdict(build_method(plan))
        assert run_key({"settings": settings, "method": plan.method, "options": options}) == run.key, run.name
    assert len(runs) > 40


def test_a_run_of_one_epoch_cuts_at_every_step():
    runs = load_experiment("cifar", Selection(only=("optg", "gmp"), settings={"epochs": 1})).runs
    assert {run.plan.method: run.options["every"] for run in runs} == {"optg": 1, "gmp": 100}


def test_a_folder_name_lists_the_changes_and_fits_a_file_system():
    long = "synthetic:3x224x224:1000:" + "1" * 300
    [run] = load_experiment(
        "cifar", Selection(only=("dense",), on=("cifar10",), settings={"data": long, "folder": "/a/b"})
    ).runs
    assert len(run.name) < 200 and "/" not in run.name and ":" not in run.name
    [run] = load_experiment(
        "dormant-decay", Selection(only=("frozen",), columns=("99",), seeds=(0,), settings={"folder": "/a/b"})
    ).runs
    assert run.name == "vgg19-cifar100-optg-0.99-epochs=80-dormant_decay=False-seed0"


def test_settings_missing_from_an_older_summary_count_as_defaults():
    run = load_experiment("dormant-decay").runs[0]
    older = fake_summary(run)
    del older["settings"]["hold"], older["options"]["momentum"]
    assert run_key(older) == run.key
    other = fake_summary(run, options={**run.options, "alpha": 0.7})
    assert run_key(other) != run.key


def test_summaries_with_options_of_earlier_versions_are_recognized():
    run = load_experiment("cifar", Selection(only=("gmp",))).runs[0]
    options = {**run.options, "alpha": None, "initial": 0.0, "every_epochs": 1}
    assert run_key(fake_summary(run, options=options)) == run.key
    assert run_key(fake_summary(run, options=options | {"initial": 0.3})) != run.key


@pytest.mark.parametrize("validate", [False, True])  # True: an epoch has fewer steps
def test_epochs_between_two_cuts_are_recognized_in_steps(validate):
    changes = {"settings": {"validate": validate}} if validate else {}
    selection = Selection(on=("cifar10",), only=("5 cycles",), columns=("100",), **changes)
    run = load_experiment("paradox-cycles", selection).runs[0]
    recorded = fake_summary(run, options={**run.options, "every": 20 * (50_000 // run.plan.recipe.batch_size)})
    assert run.options["every"] == "20 epochs" and run.plan.recipe.validate == validate
    assert (run_key(recorded) == run.key) != validate
