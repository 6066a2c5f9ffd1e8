"""The experiments that contents.toml declares, and selections of their runs."""

import pytest

from optg.core.clock import Clock
from optg.experiments.declaration import (
    Selection,
    declarations,
    declared_columns,
    declared_rows,
    experiment_datasets,
    experiment_names,
    load_experiment,
)
from optg.training.recipe import build_method


def test_every_experiment_has_cells_with_runs_on_every_dataset():
    for name in experiment_names():
        for dataset in experiment_datasets(name):
            experiment = load_experiment(name, Selection(on=(dataset,), optional_columns=True))
            assert experiment.cells and all(cell.runs for cell in experiment.cells), name
            assert len({run.name for run in experiment.runs}) == len(experiment.runs), name


def test_a_row_can_be_limited_to_some_columns():
    cells = [(cell.row, cell.column) for cell in load_experiment("structures").cells]
    assert [column for row, column in cells if row == "sr-ste"] == ["2:4"]
    assert len([column for row, column in cells if row == "gmp"]) == 8
    for name in experiment_names():
        declared = declarations()[name]
        labels = {column["label"] for column in declared_columns(declared)}
        assert all(labels.issuperset(row.get("columns", ())) for row in declared_rows(declared)), name


def test_table_1_starts_with_95_percent_on_both_datasets():
    sparsity = [run.plan.recipe.sparsity for run in load_experiment("cifar").runs]
    data = [run.plan.recipe.data for run in load_experiment("cifar").runs if run.plan.recipe.sparsity in (0.95, 0.0)]
    assert sparsity == sorted(sparsity, key=lambda s: s == 0.9) and set(data) == {"cifar10", "cifar100"}
    assert {run.plan.recipe.epochs for run in load_experiment("cifar").runs} == {160}


def test_cells_have_the_papers_figures():
    def paper(name, dataset, row, column):
        cells = load_experiment(name, Selection(on=(dataset,), optional_columns=True)).cells
        return next(c.paper for c in cells if (c.row, c.column) == (row, column)).accuracy

    assert paper("cifar", "cifar10", "dense", "") == 93.85
    assert paper("cifar", "cifar100", "optg", "95") == pytest.approx(73.24)
    assert paper("resnet50", "imagenet", "optg", "98") == pytest.approx(67.20)
    assert paper("mobilenet", "imagenet", "optg", "90") == pytest.approx(66.80)
    assert paper("schedule-ablation", "imagenet", "dpf", "ours") == 71.66
    assert paper("paradox-cycles", "cifar10", "100 cycles", "10000") == 93.87
    assert paper("paradox-cycles", "resnet50-cifar10", "10 cycles", "100") == 85.14
    assert paper("budgets", "imagenet", "ERK", "") == 74.39
    assert paper("alpha", "imagenet", "α = 1", "") == 72.32


@pytest.mark.parametrize("settings", [{"model": "digits"}, {"data": "digits"}, {"epochs": 3}])
def test_a_changed_model_data_or_length_has_no_paper_figure(settings):
    assert all(cell.paper for cell in load_experiment("cifar", Selection(on=("cifar10",))).cells)
    changed = load_experiment("cifar", Selection(on=("cifar10",), settings=settings))
    assert not any(cell.paper for cell in changed.cells) and not any("SNIP" in note for note in changed.notes)
    unchanged, changed = (load_experiment("resnet50", Selection(on=("imagenet",), settings=s)).cells for s in ({}, settings))
    assert len(unchanged) == len(changed) > 20 and all(c.paper for c in unchanged) and not any(c.paper for c in changed)


def test_another_sparsity_has_no_paper_figure():
    assert all(cell.paper for cell in load_experiment("budgets", Selection(on=("imagenet",))).cells)
    assert not any(cell.paper for cell in load_experiment("budgets", Selection(on=("imagenet",), sparsity=(0.5,))).cells)


def test_a_paper_figure_at_a_nearby_sparsity_keeps_that_sparsity():
    cells = load_experiment("resnet50", Selection(on=("imagenet",))).cells
    strs = {cell.column: cell.paper.sparsity for cell in cells if cell.row == "str"}
    assert strs["90"] == pytest.approx(90.55) and strs["99"] == pytest.approx(98.98)


def test_the_exchange_interval_is_the_same_number_of_epochs_in_every_experiment():
    """On CIFAR, SET, RigL and GraNet exchange weights every 3.8, 2.6 and 2.6 epochs."""
    for name in ("cifar", "extreme", "resnet50", "schedule-ablation"):
        for run in load_experiment(name, Selection(on=("cifar100",))).runs:
            every, steps = run.options.get("every"), 50_000 // run.plan.recipe.batch_size
            if run.plan.method in ("set", "rigl", "granet"):
                assert every / steps == pytest.approx(3.85 if run.plan.method == "set" else 2.56, rel=0.01), run.name


def test_experiments_share_identical_runs():
    """Seven experiments share one run: OptG at 99 %, 80 epochs."""
    names = ("extreme", "mask-optimizer", "schedule-ablation", "budgets", "alpha", "supermasks", "dormant-decay")
    keys = [
        {run.key for run in load_experiment(name, Selection(on=("cifar100",))).runs if run.plan.method == "optg"}
        for name in names
    ]
    assert len(set.intersection(*keys)) == 1


def test_pruning_cycles_fill_the_epochs():
    for cell in load_experiment("paradox-cycles", Selection(optional_columns=True)).cells:
        [run] = cell.runs
        method, recipe = build_method(run.plan), run.plan.recipe
        clock, cycles = Clock(recipe.epochs, 195), int(cell.row.split()[0])  # 50,000 images in batches of 256
        epochs = [Clock(recipe.epochs, 195, 195 * k) for k in range(1, recipe.epochs)]
        cuts = [now.step for now in epochs if method.due(now)]
        assert len(cuts) == cycles and recipe.epochs * cycles == int(cell.column) * (cycles + 1)
        assert {b - a for a, b in zip(cuts, [*cuts[1:], clock.total])} == {clock.total // (cycles + 1)}


@pytest.mark.parametrize(
    ("name", "selection", "message"),
    [
        ("cifr", Selection(), "did you mean 'cifar'"),
        ("cifar", Selection(on=("mars",)), "does not run on 'mars'; expected cifar10, cifar100"),
        ("cifar", Selection(only=("otpg",)), "did you mean 'optg'"),
        ("cifar", Selection(columns=("97",)), "no column '97'"),
        ("cifar", Selection(settings={"batchsize": 3}), "did you mean 'batch_size'"),
        ("cifar", Selection(settings={"epochs": 0}), "epochs is 0; expected at least 1"),
        ("cifar", Selection(settings={"epochs": "many"}), "epochs is 'many'; expected int"),
        ("cifar", Selection(settings={"sparsity": 0.5}), "--set sparsity: expected --sparsity"),
        ("extreme", Selection(settings={"seed": 3}), "--set seed: expected --seeds"),
        ("cifar", Selection(columns=("95",), sparsity=(0.98,)), "expected one of them"),
        ("alpha", Selection(sparsity=(0.9, 0.95)), "columns of alpha are not sparsities; expected one"),
        ("paradox-cycles", Selection(settings={"epochs": 3}), "expected --columns instead of --epochs"),
        ("schedules", Selection(settings={"epochs": 3}), "schedules is drawn, not trained"),
    ],
)
def test_impossible_selections_are_refused(name, selection, message):
    with pytest.raises(ValueError, match=message):
        load_experiment(name, selection)


def test_a_setting_that_the_experiment_itself_sets_cannot_be_changed():
    with pytest.raises(ValueError, match="paradox-cycles itself sets cycles, in '1 cycle'"):
        load_experiment("paradox-cycles", Selection(settings={"cycles": 3}))
    with pytest.raises(ValueError, match="extreme itself sets schedule, in 'feather"):
        load_experiment("extreme", Selection(settings={"schedule": "cosine"}))
    assert load_experiment("extreme", Selection(only=("optg",), settings={"schedule": "multistep"})).runs


def test_the_paper_figure_stays_if_model_data_and_epochs_stay():
    def paper(**settings):
        return (
            load_experiment("cifar", Selection(on=("cifar10",), only=("optg",), columns=("95",), settings=settings))
            .cells[0]
            .paper
        )

    assert paper(epochs=160).accuracy == paper(data="cifar10", model="vgg19").accuracy == paper(lr=0.2).accuracy == 93.79
    assert paper(epochs=80) is paper(data="cifar100") is paper(model="vgg19-maxpool") is None
