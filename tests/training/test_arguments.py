import dataclasses

import pytest

from optg.training.arguments import TrainOptions, parse_train_args
from optg.training.recipe import Recipe, RecipeError, build_method, dump, flag, load


def test_without_arguments_it_is_the_digits_recipe():
    plan, options = parse_train_args([])
    assert plan.recipe == load("digits").recipe and plan.method == "optg" and plan.methods == {"optg": {}}
    assert options == TrainOptions()


def test_recipe_and_method_set_the_defaults_of_the_other_flags():
    plan, _ = parse_train_args(
        ["--epochs", "3", "--method=rigl", "--recipe", "vgg19-cifar10", "--method.fraction", "0.2", "--no-compile"]
    )
    assert (plan.name, plan.recipe.model, plan.recipe.epochs, plan.recipe.compile) == ("vgg19-cifar10", "vgg19", 3, False)
    assert plan.methods == {"rigl": {"every": 500, "fraction": 0.2}}


@pytest.mark.parametrize("method", ["rigl", "optg", "imp", "set"])
def test_the_plan_rebuilds_the_method_with_the_seed_of_the_run(method):
    plan, _ = parse_train_args(["--method", method, "--seed", "3"])
    expected = build_method(dataclasses.replace(load("digits"), method=method))
    if hasattr(expected, "seed"):
        expected.seed = 3
    assert build_method(plan) == expected


def test_dense_training_has_no_sparsity_by_default():
    assert parse_train_args(["--method", "dense"])[0].recipe.sparsity == 0.0
    assert parse_train_args(["--method", "dense", "--sparsity", "0.5"])[0].recipe.sparsity == 0.5  # `sparsify` refuses it


@pytest.mark.parametrize(("structure", "expected"), [("2:4", 0.5), ("0*=1:4, *=2:4", 0.75), ("1x4", 0.95), ("0*=2:4", 0.95)])
def test_a_structure_of_nm_sets_the_sparsity_that_is_not_given(structure, expected):
    assert parse_train_args(["--recipe", "digits", "--structure", structure])[0].recipe.sparsity == expected
    assert parse_train_args(["--structure", structure, "--sparsity", "0.9"])[0].recipe.sparsity == 0.9


def test_options_that_do_not_change_the_weights_are_returned_separately():
    _, options = parse_train_args(["--fresh", "--parallel", "ddp", "--keep", "5", "--output", "there"])
    assert options.fresh and options.parallel == "ddp" and options.keep == 5 and str(options.output) == "there"


@pytest.mark.parametrize("flag", ["--no-resume", "--resume"])
def test_flags_that_are_gone_name_the_new_one(flag):
    with pytest.raises(RecipeError, match=f"{flag} is gone: .*--fresh"):
        parse_train_args([flag])


def test_options_of_the_model_have_any_name_and_toml_values():
    flags = ["--model.img-size", "32", "--model.depths=[2, 2]", "--model.global-pool", "avg", "--model.bias", "false"]
    plan, _ = parse_train_args(["--model", "timm:some_net", *flags, "--epochs", "3"])
    assert plan.recipe.model_options == {"img_size": 32, "depths": [2, 2], "global_pool": "avg", "bias": False}
    assert plan.recipe.epochs == 3 and type(plan.recipe) is Recipe


def test_options_of_the_model_are_kept_with_the_recipe(tmp_path):
    plan, _ = parse_train_args(
        ["--model", "timm:some_net", "--model.img-size", "32", "--model.pool", "3", "--model.name", "'3'"]
    )
    (tmp_path / "my.toml").write_text(dump(plan))
    again, _ = parse_train_args(["--recipe", str(tmp_path / "my.toml"), "--model.pool", "4"])
    assert again.recipe.model_options == {"img_size": 32, "pool": 4, "name": "3"}
    assert again.changes == {"model_options": again.recipe.model_options}
    other, _ = parse_train_args(["--recipe", str(tmp_path / "my.toml"), "--model", "digits"])
    assert other.recipe.model_options == {}  # they belong to the other model
    assert flag("", "model_options", plan.recipe.model_options) == [
        "--model.img-size", "32", "--model.pool", "3", "--model.name", '"3"',
    ]  # fmt: skip


@pytest.mark.parametrize("flags", [["--model.img-size"], ["--model.img-size", "--epochs", "3"], ["--model.", "3"]])
def test_an_option_of_the_model_needs_a_value(flags):
    with pytest.raises(RecipeError, match=r"expected an option of the model and its value, such as --model.img-size 32"):
        parse_train_args(flags)
