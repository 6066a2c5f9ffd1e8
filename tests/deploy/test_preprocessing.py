"""The preprocessing that a packed file describes is the dataset's own."""

import pytest
import torch

from optg import data as datasets
from optg.deploy.preprocessing import preprocessing_of
from optg.training.recipe import Recipe


@pytest.mark.parametrize("name", ["digits", "cifar10", "cifar100", "imagenet", "synthetic"])
def test_preprocessing_matches_the_dataset(name: str) -> None:
    shape = (1, 8, 8) if name == "digits" else (3, 32, 32)
    seen = preprocessing_of(Recipe(data=name), shape)
    assert len(seen["mean"]) == len(seen["std"]) == shape[0] and all(0 < value < 1 for value in (*seen["mean"], *seen["std"]))
    if name in ("digits", "synthetic"):
        data = datasets.load(name, batch_size=2, device="cpu", seed=0)
        scale = 16 if name == "digits" else 255
        torch.testing.assert_close(torch.tensor(seen["mean"]) * scale, data.mean.flatten())
        torch.testing.assert_close(torch.tensor(seen["std"]) * scale, data.std.flatten())
    assert preprocessing_of(Recipe(data="own.module:load"), shape) == {}
