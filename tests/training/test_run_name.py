"""Default names of run folders."""

import pytest

from optg.training.arguments import parse_train_args
from optg.training.run_name import folder_name


def name(*args: str) -> str:
    return folder_name(parse_train_args(list(args))[0])


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        ([], "digits-optg-0.95-seed0"),
        (["--method", "dense"], "digits-dense-0-seed0"),
        (["--recipe", "vgg19-cifar10:authors", "--sparsity", "0.9", "--seed", "3"], "vgg19-cifar10-authors-optg-0.9-seed3"),
        (["--recipe", "vgg19-cifar10", "--folder", "/data", "--no-graph", "--no-compile"], "vgg19-cifar10-optg-0.95-seed0"),
        (["--epochs", "25", "--model", "digits", "--method.every", "epoch"], "digits-optg-0.95-seed0"),
    ],
)
def test_runs_with_the_settings_of_the_recipe_keep_their_names(args, expected):
    """So a run that was started before names listed changes still resumes."""
    assert name(*args) == expected


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (["--model", "resnet20"], "digits-optg-0.95-model=resnet20-seed0"),
        (["--data", "synthetic:1x8x8:10:64", "--epochs", "3"], "digits-optg-0.95-data=synthetic_1x8x8_10_64-epochs=3-seed0"),
        (["--max-steps", "100"], "digits-optg-0.95-max_steps=100-seed0"),
        (
            ["--model", "timm:vit_tiny", "--model.img-size", "32"],
            "digits-optg-0.95-model=timm_vit_tiny-model.img_size=32-seed0",
        ),
        (["--lr", "0.1", "--method.alpha", "1"], "digits-optg-0.95-lr=0.1-method.alpha=1.0-seed0"),
    ],
)
def test_a_changed_setting_is_part_of_the_name(args, expected):
    assert name(*args) == expected


def test_a_long_name_fits_a_file_system_and_stays_unique():
    first, second = (name("--data", f"package.{'x' * 300}:{function}") for function in "ab")
    assert first != second and max(len(first), len(second)) < 200
