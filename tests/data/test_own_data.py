"""Datasets of a user's own: `package.module:function`."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from optg.data import own
from tests.data.small_data import load_small, md5


@pytest.fixture
def write_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    """A function that writes a module with this body of a dataset function, and returns the name to load it by."""
    monkeypatch.syspath_prepend(tmp_path)

    def make(body: str) -> str:
        name = f"written_{md5(body.encode())}"
        (tmp_path / f"{name}.py").write_text(f"import torch\nfrom torch import zeros, ones\ndef data(folder):\n    {body}\n")
        return f"{name}:data"

    return make


def test_bytes_are_normalised_and_floats_are_not(write_module: Callable[[str], str], tmp_path: Path) -> None:
    images = "g = torch.Generator().manual_seed(0); x = torch.randint(9, 90, (40, 2, 6, 6), generator=g); x[:, 1] = 7"
    labels = "y = torch.arange(40) % 4; open(folder / 'seen', 'w')"
    name = write_module(f"{images}; {labels}; return (x.byte(), y), (x[:5].byte(), y[:5])")
    data = load_small(tmp_path, name)
    assert (data.classes, data.shape, data.sizes) == (4, (2, 6, 6), (40, 5)) and (tmp_path / "seen").exists()
    seen = torch.cat([images for images, _ in data.train(0)])
    assert seen[:, 0].mean().abs() < 1e-5 and abs(seen[:, 0].std(correction=0) - 1) < 1e-5 and not seen[:, 1].any()
    name = write_module(f"{images}; {labels}; return (x.double(), y), (x[:5].double(), y[:5])")
    ((images, _),) = load_small(tmp_path, name).test()
    assert images.dtype == torch.float32 and (images[:, 1] == 7).all()


def test_statistics_equal_those_of_floats() -> None:
    images = torch.randint(256, (50, 3, 4, 4), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    mean, std = own.statistics(images)
    by_channel = images.double().transpose(0, 1).flatten(1)
    assert mean == pytest.approx(by_channel.mean(1).tolist()) and std == pytest.approx(by_channel.std(1, correction=0).tolist())


GOOD = "torch.arange(9)"


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("return 3", "returned a int; expected ((images, labels), (images, labels)) of tensors"),
        (f"return zeros(9, 3, 4, 4), {GOOD}", "returned a tuple; expected"),
        (f"return (zeros(9, 4, 4), {GOOD}), (zeros(9, 4, 4), {GOOD})", "the training images are float32 [9, 4, 4]; expected"),
        (
            f"return (zeros(9, 1, 4, 4).int(), {GOOD}), (zeros(9, 1, 4, 4), {GOOD})",
            "images are int32 [9, 1, 4, 4]; expected uint8",
        ),
        (f"return (zeros(9, 1, 4, 4), {GOOD}), (zeros(0, 1, 4, 4), {GOOD}[:0])", "the test images are float32 [0, 1, 4, 4]"),
        (
            f"return (zeros(9, 1, 4, 4), {GOOD}.float()), (ones(9, 1, 4, 4), {GOOD})",
            "training labels are float32 [9]; expected int64 [9]",
        ),
        (
            f"return (zeros(9, 1, 4, 4), {GOOD}), (ones(9, 1, 4, 4), {GOOD}[:5])",
            "the test labels are int64 [5]; expected int64 [9]",
        ),
        (f"return (zeros(9, 1, 4, 4), {GOOD} - 1), (ones(9, 1, 4, 4), {GOOD})", "a training label is -1; expected 0 or more"),
        (
            f"return (zeros(9, 1, 4, 4), {GOOD}), (ones(9, 1, 4, 4), {GOOD} + 1)",
            "a test label is 9; the training labels end at 8",
        ),
        (
            f"return (zeros(9, 1, 4, 4), {GOOD}), (zeros(9, 1, 4, 5), {GOOD})",
            "test images float32 [9, 1, 4, 5]; make shape and type the same",
        ),
        (f"return (zeros(9, 1, 4, 4), {GOOD}), (zeros(9, 1, 4, 4).byte(), {GOOD})", "test images uint8 [9, 1, 4, 4]; make"),
    ],
)
def test_returned_values_are_checked(write_module: Callable[[str], str], tmp_path: Path, body: str, message: str) -> None:
    with pytest.raises(ValueError) as caught:
        load_small(tmp_path, write_module(body))
    assert message in str(caught.value)
