from pathlib import Path

import torch

from optg.data import digits
from optg.data.augment import normalise
from tests.data.small_data import equal_batches, load_small


def test_shapes_and_types() -> None:
    (train_images, train_labels), (test_images, test_labels) = digits.load()
    assert train_images.shape == (1437, 1, 8, 8) and train_labels.shape == (1437,)
    assert test_images.shape == (360, 1, 8, 8) and test_labels.shape == (360,)
    assert train_images.dtype == test_images.dtype == torch.float32
    assert train_labels.dtype == test_labels.dtype == torch.int64


def test_scale() -> None:
    (images, _), _ = digits.load()
    assert abs(images.mean().item()) < 1e-3
    assert abs(images.std().item() - 1) < 1e-3
    pixels = images * digits.STD + digits.MEAN
    assert torch.allclose(pixels, pixels.round(), atol=1e-4)
    assert (pixels.round().min(), pixels.round().max()) == (0, 16)


def test_every_class_is_in_both_parts() -> None:
    (_, train_labels), (_, test_labels) = digits.load()
    assert train_labels.bincount().tolist() == [147, 147, 138, 150, 137, 153, 141, 139, 146, 139]
    assert test_labels.bincount().tolist() == [31, 35, 39, 33, 44, 29, 40, 40, 28, 41]


def test_the_split_is_fixed() -> None:
    torch.manual_seed(1)
    first = digits.load()
    torch.manual_seed(2)
    for part, again in zip(first, digits.load()):
        assert torch.equal(part[0], again[0]) and torch.equal(part[1], again[1])
    (_, train_labels), (_, test_labels) = first
    assert train_labels[:10].tolist() == [2, 8, 2, 6, 6, 7, 1, 9, 8, 5]
    assert test_labels[:10].tolist() == [7, 9, 4, 7, 0, 2, 6, 1, 3, 1]


def test_a_digit_by_eye() -> None:
    (images, labels), _ = digits.load()
    pixels = (images[0, 0] * digits.STD + digits.MEAN).round().int()
    assert ["".join(" .:-=+*#%@"[v * 9 // 16] for v in row) for row in pixels.tolist()] == [
        "  *@%.  ",
        " :@**#  ",
        " .# :%  ",
        "    **  ",
        "    @-  ",
        "   +%   ",
        "  *@@*  ",
        "  ##=#@=",
    ]
    assert labels[0] == 2


def test_the_dataset_has_the_digits_of_the_examples() -> None:
    (images, labels), test = digits.load()
    data = load_small(Path(), "digits", batch_size=360)
    assert data.classes == 10 and data.shape == (1, 8, 8) and data.sizes == (1437, 360)
    assert equal_batches(list(data.test()), [test])
    order = torch.cat([labels for _, labels in data.train(0)])
    assert not torch.equal(order, labels[: len(order)])
    assert torch.equal(normalise(data.images, data.mean, data.std), images)
