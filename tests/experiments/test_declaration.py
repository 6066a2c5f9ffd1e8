"""What contents.toml declares, and that the commands made from it train just that."""

import dataclasses
from pathlib import Path

import pytest

from optg.experiments import declaration
from optg.experiments.command import Reproduce, choice, reproduce
from optg.experiments.declaration import Choice, Run, key_of, load
from optg.training.arguments import parse_train_args
from optg.training.recipe import build_method


def each_place():
    for name in declaration.names():
        for place in declaration.contents()[name].get("on", {}):
            yield name, load(name, Choice(on=(place,), asked=True))


def one_of_each_kind() -> list[Run]:
    """A run for each recipe, method and set of changed names."""
    kinds: dict[str, Run] = {}
    for _, experiment in each_place():
        for run in experiment.runs:
            settings, options = run.changes
            kinds.setdefault(repr((run.recipe, run.plan.method, sorted(settings), sorted(options))), run)
    return list(kinds.values())


def test_a_command_trains_what_was_declared():
    runs = [run for run in one_of_each_kind() if run.needs is None]  # the others need the model of another run
    for run in runs:
        plan, _ = parse_train_args(run.arguments[1:])
        settings, options = dataclasses.asdict(plan.recipe), dataclasses.asdict(build_method(plan))
        assert key_of({"settings": settings, "method": plan.method, "options": options}) == run.key, run.name
    assert len(runs) > 40


def test_every_cell_has_runs_and_every_experiment_a_place():
    for name, experiment in each_place():
        assert experiment.cells and all(cell.runs for cell in experiment.cells), name
        assert len({run.name for run in experiment.runs}) == len(experiment.runs), name


def test_tab_1_begins_with_95_percent_on_both_datasets():
    sparsity = [run.plan.recipe.sparsity for run in load("cifar").runs]
    data = [run.plan.recipe.data for run in load("cifar").runs if run.plan.recipe.sparsity in (0.95, 0.0)]
    assert sparsity == sorted(sparsity, key=lambda s: s == 0.9) and set(data) == {"cifar10", "cifar100"}
    assert {run.plan.recipe.epochs for run in load("cifar").runs} == {160}


def test_figures_of_the_paper_stand_beside_their_cells():
    def paper(name, place, row, column):
        cells = load(name, Choice(on=(place,), asked=True)).cells
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
def test_the_papers_figures_do_not_stand_beside_something_else(settings):
    assert all(cell.paper for cell in load("cifar", Choice(on=("cifar10",))).cells)
    changed = load("cifar", Choice(on=("cifar10",), settings=settings))
    assert not any(cell.paper for cell in changed.cells) and not any("SNIP" in note for note in changed.notes)
    there, changed = (load("resnet50", Choice(on=("imagenet",), settings=s)).cells for s in ({}, settings))
    assert len(there) == len(changed) > 20 and all(c.paper for c in there) and not any(c.paper for c in changed)


def test_nor_beside_another_sparsity():
    assert all(cell.paper for cell in load("budgets", Choice(on=("imagenet",))).cells)
    assert not any(cell.paper for cell in load("budgets", Choice(on=("imagenet",), sparsity=(0.5,))).cells)


def test_a_paper_sparsity_that_is_not_ours_is_named():
    cells = load("resnet50", Choice(on=("imagenet",))).cells
    strs = {cell.column: cell.paper.sparsity for cell in cells if cell.row == "str"}
    assert strs["90"] == pytest.approx(90.55) and strs["99"] == pytest.approx(98.98)


def test_what_a_recipe_counts_in_steps_is_the_same_in_each():
    """SET, RigL and GraNet exchange weights every 3.8, 2.6 and 2.6 epochs on CIFAR, whatever is trained."""
    for name in ("cifar", "extreme", "resnet50", "schedule-ablation"):
        for run in load(name, Choice(on=("cifar100",))).runs:
            every, steps = run.options.get("every"), 50_000 // run.plan.recipe.batch_size
            if run.plan.method in ("set", "rigl", "granet"):
                assert every / steps == pytest.approx(3.85 if run.plan.method == "set" else 2.56, rel=0.01), run.name


def test_experiments_share_what_is_the_same():
    """OptG at 99 %, 80 epochs: one run for seven experiments."""
    names = ("extreme", "mask-optimizer", "schedule-ablation", "budgets", "alpha", "supermasks", "dormant-decay")
    keys = [{run.key for run in load(name, Choice(on=("cifar100",))).runs if run.plan.method == "optg"} for name in names]
    assert len(set.intersection(*keys)) == 1


def test_cycles_of_removal_fill_the_epochs():
    from optg.core.clock import Clock

    for cell in load("paradox-cycles", Choice(asked=True)).cells:
        [run] = cell.runs
        method, recipe = build_method(run.plan), run.plan.recipe
        clock, cycles = Clock(recipe.epochs, 195), int(cell.row.split()[0])  # 50,000 images in batches of 256
        epochs = [Clock(recipe.epochs, 195, 195 * k) for k in range(1, recipe.epochs)]
        cuts = [now.step for now in epochs if method.due(now)]
        assert len(cuts) == cycles and recipe.epochs * cycles == int(cell.column) * (cycles + 1)
        assert {b - a for a, b in zip(cuts, [*cuts[1:], clock.total])} == {clock.total // (cycles + 1)}


def test_one_epoch_has_no_second_to_cut_at():
    runs = load("cifar", Choice(only=("optg", "gmp"), settings={"epochs": 1})).runs
    assert {run.plan.method: run.options["every"] for run in runs} == {"optg": 1, "gmp": 100}


@pytest.mark.parametrize(
    ("name", "choice", "message"),
    [
        ("cifr", Choice(), "did you mean 'cifar'"),
        ("cifar", Choice(on=("mars",)), "does not run on 'mars'; expected cifar10, cifar100"),
        ("cifar", Choice(only=("otpg",)), "did you mean 'optg'"),
        ("cifar", Choice(columns=("97",)), "no column '97'"),
        ("cifar", Choice(settings={"batchsize": 3}), "did you mean 'batch_size'"),
        ("cifar", Choice(settings={"epochs": 0}), "epochs is 0; expected at least 1"),
        ("cifar", Choice(settings={"epochs": "many"}), "epochs is 'many'; expected int"),
        ("cifar", Choice(settings={"sparsity": 0.5}), "--set sparsity: expected --sparsity"),
        ("extreme", Choice(settings={"seed": 3}), "--set seed: expected --seeds"),
        ("cifar", Choice(columns=("95",), sparsity=(0.98,)), "expected one of them"),
        ("alpha", Choice(sparsity=(0.9, 0.95)), "columns of alpha are not sparsities; expected one"),
        ("paradox-cycles", Choice(settings={"epochs": 3}), "expected --columns instead of --epochs"),
        ("schedules", Choice(settings={"epochs": 3}), "schedules is drawn, not trained"),
    ],
)
def test_what_there_is_not_is_refused(name, choice, message):
    with pytest.raises(ValueError, match=message):
        load(name, choice)


def test_a_name_says_what_is_unusual_and_fits_a_file_system():
    long = "synthetic:3x224x224:1000:" + "1" * 300
    [run] = load("cifar", Choice(only=("dense",), on=("cifar10",), settings={"data": long, "folder": "/a/b"})).runs
    assert len(run.name) < 200 and "/" not in run.name and ":" not in run.name
    [run] = load("dormant-decay", Choice(only=("frozen",), columns=("99",), seeds=(0,), settings={"folder": "/a/b"})).runs
    assert run.name == "vgg19-cifar100-optg-0.99-epochs=80-dormant_decay=False-seed0"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"names": ("cifar",), "results": Path("R.md")},
            "cifar says nothing of all experiments; expected names without --results",
        ),
        ({"results": Path("R.md"), "jobs": 3}, "--jobs says nothing of all experiments; .* or --results alone"),
        ({"names": ("nosuch",), "list": True}, "nosuch says nothing of all experiments"),
        ({"plan": True}, "--plan says nothing of all experiments"),
        ({"record": Path("a.jsonl")}, "--record says nothing"),
    ],
)
def test_flags_that_nothing_would_come_of_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        reproduce(Reproduce(**options))


def test_what_an_experiment_sets_itself_is_not_set_for_it():
    with pytest.raises(ValueError, match="paradox-cycles itself sets cycles, in '1 cycle'"):
        load("paradox-cycles", Choice(settings={"cycles": 3}))
    with pytest.raises(ValueError, match="extreme itself sets schedule, in 'feather"):
        load("extreme", Choice(settings={"schedule": "cosine"}))
    assert load("extreme", Choice(only=("optg",), settings={"schedule": "multistep"})).runs


def test_the_papers_figure_stands_beside_runs_that_are_as_long():
    def paper(**settings):
        return load("cifar", Choice(on=("cifar10",), only=("optg",), columns=("95",), settings=settings)).cells[0].paper

    assert paper(epochs=160).accuracy == paper(data="cifar10", model="vgg19").accuracy == paper(lr=0.2).accuracy == 93.79
    assert paper(epochs=80) is paper(data="cifar100") is paper(model="vgg19-maxpool") is None


def test_the_same_place_sparsity_or_seed_twice_is_once():
    asked = choice(Reproduce(("cifar",), on=("cifar10", "cifar10"), sparsity=(0.9, 0.9), seeds=(1, 1)))
    assert (asked.on, asked.sparsity, asked.seeds) == (("cifar10",), (0.9,), (1,))
