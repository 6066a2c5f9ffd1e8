"""What holds for every dataset, and the errors of `load`."""

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from optg.data import Data
from optg.data.base import last_tenth
from tests.data.small_data import Batches, equal_batches, load_small


def test_batches_have_the_right_sizes_and_types(make_data: Callable[..., Data]) -> None:
    data = make_data()
    assert data.steps_per_epoch == data.sizes[0] // 8 and data.skipped == 0
    batches = list(data.train(0))
    assert len(batches) == data.steps_per_epoch
    for images, labels in batches:
        assert images.shape == (8, *data.shape) and images.dtype == torch.float32 and images.is_contiguous()
        assert labels.shape == (8,) and labels.dtype == torch.int64 and labels.min() >= 0 and labels.max() < data.classes
    sizes = [len(labels) for _, labels in data.test()]
    together = data.test_batch
    assert together >= 8 and sum(sizes) == data.sizes[1]
    assert set(sizes[:-1]) <= {together} and sizes[-1] == (data.sizes[1] % together or together)


def test_batches_depend_only_on_seed_and_epoch(make_data: Callable[..., Data]) -> None:
    data = make_data()
    first = list(data.train(0))
    assert equal_batches(first, list(data.train(0))) and equal_batches(first, list(make_data().train(0)))
    assert not equal_batches(first, list(data.train(1))) and not equal_batches(first, list(make_data(seed=4).train(0)))
    assert equal_batches(list(data.test()), list(make_data(seed=4).test()))


def test_a_resumed_epoch_continues_with_the_same_batches(make_data: Callable[..., Data]) -> None:
    data = make_data()
    assert equal_batches(list(data.train(2, start=1)), list(data.train(2))[1:])
    assert list(data.train(2, start=data.steps_per_epoch)) == []
    with pytest.raises(ValueError, match=f"start is {data.steps_per_epoch + 1}; expected 0 to {data.steps_per_epoch}"):
        next(data.train(2, start=data.steps_per_epoch + 1))


@pytest.mark.parametrize("world", [2, 4, 8])
def test_ranks_together_see_the_batches_of_one_process(make_data: Callable[..., Data], world: int) -> None:
    one, ranks = make_data(), [make_data(rank=rank, world=world) for rank in range(world)]

    def joined(parts: list[Iterator[tuple[Tensor, Tensor]]]) -> Batches:
        return [(torch.cat([x for x, _ in shares]), torch.cat([y for _, y in shares])) for shares in zip(*parts, strict=True)]

    assert equal_batches(joined([rank.train(1) for rank in ranks]), list(one.train(1)))
    assert equal_batches(joined([rank.test() for rank in ranks]), list(one.test()))
    assert all(len(labels) == 8 // world for rank in ranks for _, labels in rank.train(1))


def test_global_random_states_are_not_touched(make_data: Callable[..., Data]) -> None:
    before, numpy_before, python_before = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
    data = make_data()
    list(data.train(0)), list(data.test())
    assert torch.equal(before, torch.get_rng_state())
    assert numpy_before == np.random.get_state()[1].tolist() and python_before == random.getstate()


def as_set(batches: Iterator[tuple[Tensor, Tensor]]) -> list[bytes]:
    return sorted(image.numpy().tobytes() for images, _ in batches for image in images)


def test_validation_images_are_held_out_of_training(make_data: Callable[..., Data]) -> None:
    whole, data = make_data(batch_size=1, augment=False), make_data(batch_size=1, augment=False, validate=True)
    assert data.held_out in (whole.sizes[0] // 10, 3)  # of ImageNet: one image of each of three classes
    assert data.sizes == (whole.sizes[0] - data.held_out, whole.sizes[1])
    assert data.steps_per_epoch == data.sizes[0] and whole.held_out == 0 and list(whole.validation()) == []
    trained, held = as_set(data.train(0)), as_set(data.validation())
    assert len(trained) == data.sizes[0] and len(held) == data.held_out
    assert sorted(trained + held) == as_set(whole.train(0))
    assert equal_batches(list(data.test()), list(whole.test()))


def test_ranks_together_see_the_validation_images_of_one_process(make_data: Callable[..., Data]) -> None:
    one, pair = make_data(validate=True), [make_data(validate=True, rank=rank, world=2) for rank in range(2)]
    shares = zip(*(rank.validation() for rank in pair), strict=True)
    joined = [(torch.cat([x for x, _ in parts]), torch.cat([y for _, y in parts])) for parts in shares]
    assert equal_batches(joined, list(one.validation()))


def test_validation_images_are_the_last_tenth(small_cifars: Path) -> None:
    whole, data = load_small(small_cifars, "cifar10"), load_small(small_cifars, "cifar10", validate=True)
    assert torch.equal(torch.cat([data.images, data.held[0]]), whole.images) and data.held_out == 10


def test_sorted_images_lose_the_last_tenth_of_each_class() -> None:
    labels = torch.tensor([0] * 30 + [1] * 20 + [2] * 5 + [3])
    held = last_tenth(labels, by_class=True).nonzero().flatten().tolist()
    assert held == [27, 28, 29, 48, 49, 54]
    assert last_tenth(labels, by_class=False).nonzero().flatten().tolist() == [51, 52, 53, 54, 55]


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("cifar-10", {}, "unknown dataset 'cifar-10'; did you mean 'cifar10'? Known: digits, cifar10, cifar100, imagenet"),
        ("synthetic:3x32", {}, "'synthetic:3x32'; expected synthetic:SHAPE:CLASSES:IMAGES, such as synthetic:3x32x32:10:2048"),
        ("synthetic:3x32x32:0:9", {}, "expected synthetic:SHAPE:CLASSES:IMAGES"),
        ("synthetic:3x4x4:2:9", {"batch_size": 10}, "batch_size is 10; synthetic:3x4x4:2:9 has 9 training images"),
        ("digits", {"batch_size": 0}, "batch_size is 0; expected at least 1"),
        ("digits", {"batch_size": 9, "world": 2}, "batch_size is 9; expected a multiple of world, which is 2"),
        ("digits", {"rank": 2, "world": 2}, "rank is 2; expected at least 0 and below world, which is 2"),
        ("digits", {"workers": -1}, "workers is -1; expected at least 0"),
        ("digits", {"size": 0}, "size is 0; expected at least 1"),
        ("digits", {"size": 224}, "size is 224; digits has images of 8×8. Leave size out"),
        ("synthetic:3x4x4:2:9", {"batch_size": 9, "validate": True}, "has 8 training images left beside its validation images"),
        ("synthetic:3x4x4:2:1", {"batch_size": 1, "validate": True}, "expected at least 2 to hold out a tenth"),
        ("no_such_module:data", {}, "cannot import 'no_such_module'"),
        ("tests.toy:convnets", {}, "the module 'tests.toy' has no function 'convnets'; did you mean 'convnet'?"),
        ("tests.toy:convnet", {}, "tests.toy:convnet cannot be called with folder="),
        ("imagenet", {}, "put train/CLASS/*.JPEG and val/CLASS/*.JPEG there"),
    ],
)
def test_errors(tmp_path: Path, name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, FileNotFoundError)) as caught:
        load_small(tmp_path, name, **options)
    assert message in str(caught.value)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("name", ["digits", "cifar10", "imagenet"])
def test_a_gpu_gets_the_same_batches(request: pytest.FixtureRequest, name: str) -> None:
    folder = request.getfixturevalue("photo_folders" if name == "imagenet" else "small_cifars")
    host, device = (load_small(folder, name, device=device) for device in ("cpu", "cuda"))
    for mine, others in ((host.train(1), device.train(1)), (host.test(), device.test())):
        assert equal_batches(list(mine), [(images.cpu(), labels.cpu()) for images, labels in others])
