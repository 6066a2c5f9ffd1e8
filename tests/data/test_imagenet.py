import os
import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from optg.data import imagenet
from tests.data.small_data import equal_batches, load_small, write_picture


def test_labels_match_their_images(photo_folders: Path) -> None:
    data = load_small(photo_folders, "imagenet", size=16)
    assert (data.classes, data.shape, data.sizes) == (3, (3, 16, 16), (21, 9))
    for images, labels in (*data.train(0), *data.test()):
        red = (images[:, 0].mean((1, 2)) * imagenet.STD[0] + imagenet.MEAN[0]) * 255
        assert ((red - 100 * labels).abs() < 4).all()


def test_the_centre_equals_resizing_and_cropping(tmp_path: Path) -> None:
    for size in ((512, 320), (256, 300)):
        write_picture(tmp_path / "image.png", 30, size)
        with Image.open(tmp_path / "image.png") as image:
            short = min(size)
            resized = image.resize((size[0] * 256 // short, size[1] * 256 // short), Image.Resampling.BILINEAR)
        left, top = (resized.width - 224) // 2, (resized.height - 224) // 2
        expected = np.asarray(resized.crop((left, top, left + 224, top + 224))).transpose(2, 0, 1)
        made = imagenet.read_image(str(tmp_path / "image.png"), 224, None)
        assert made.shape == (3, 224, 224) and abs(made.numpy().astype(int) - expected).max() <= 1


def test_random_boxes() -> None:
    chance = random.Random(0)
    shares, ratios = [], []
    for _ in range(2000):
        left, top, right, bottom = imagenet.random_box(400, 300, chance)
        assert 0 <= left < right <= 400 and 0 <= top < bottom <= 300
        shares.append((right - left) * (bottom - top) / 120_000)
        ratios.append((right - left) / (bottom - top))
    assert 0.0799 < min(shares) < 0.09 and 0.95 < max(shares) <= 1.0001
    assert 0.7499 < min(ratios) < 0.76 and 1.32 < max(ratios) < 1.3334
    assert imagenet.random_box(1000, 3, chance) == (498, 0, 502, 3)  # none of ten tries fits


def test_images_are_mirrored_half_of_the_time(photo_folders: Path) -> None:
    data = load_small(photo_folders, "imagenet", size=16)
    images = torch.cat([images for epoch in range(4) for images, _ in data.train(epoch)])
    rising = images[:, 1, :, -1].mean(1) > images[:, 1, :, 0].mean(1)  # green grows to the right
    assert 0.25 < rising.float().mean() < 0.75
    plain = torch.cat([images for images, _ in load_small(photo_folders, "imagenet", size=16, augment=False).train(0)])
    assert (plain[:, 1, :, -1].mean(1) > plain[:, 1, :, 0].mean(1)).sum() >= len(plain) - 1  # all except the grey one


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_workers_give_the_batches_of_one_process(photo_folders: Path) -> None:
    alone, data = load_small(photo_folders, "imagenet", size=16), load_small(photo_folders, "imagenet", size=16, workers=2)
    before = torch.get_rng_state()
    for epoch in range(2):
        assert equal_batches(list(data.train(epoch)), list(alone.train(epoch)))
        assert equal_batches(list(data.test()), list(alone.test()))
    stale = data.train(0)
    next(stale)  # abandoned in the middle
    assert equal_batches(list(data.train(1, start=1)), list(alone.train(1))[1:])
    with pytest.raises(RuntimeError, match="one pass at a time"):
        next(stale)
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.parametrize("workers", [0, 2])
def test_an_unreadable_image_is_reported_once_and_replaced(photo_folders: Path, workers: int) -> None:
    data = load_small(photo_folders, "imagenet", size=16, batch_size=21, augment=False, workers=workers)
    order = imagenet.shuffled(21, 3, 0).tolist()
    ((images, labels),) = load_small(photo_folders, "imagenet", size=16, batch_size=21, augment=False).train(0)
    bad = [data.training.loader.dataset.files.path(order[i]) for i in (4, 5, 20)]  # two in a row, and the last
    Path(bad[0]).write_bytes(b"not an image")
    Path(bad[1]).write_bytes(Path(bad[1]).read_bytes()[:150])  # cut short
    Path(bad[2]).unlink()
    with pytest.warns(UserWarning) as caught:
        passes = [*data.train(0), *data.train(0), *data.train(1)]
    named = [str(w.message).split(" cannot be read (") for w in caught if "the next image takes its place" in str(w.message)]
    assert sorted(path for path, _ in named) == sorted(bad) and data.skipped == 3
    replaced = torch.tensor([6 if i in (4, 5) else 0 if i == 20 else i for i in range(21)])
    assert equal_batches(passes[:2], [(images[replaced], labels[replaced])] * 2)


def test_a_failing_disk_is_an_error(photo_folders: Path) -> None:
    data = load_small(photo_folders, "imagenet", size=16)
    for path in photo_folders.glob("val/*/*"):
        path.unlink()
    with pytest.raises(OSError, match="is the disk still there"):
        list(data.test())


def test_file_names_that_are_not_utf8(photo_folders: Path) -> None:
    write_picture(photo_folders / "val" / "ant" / "ä ö.JPEG", 0)
    (photo_folders / "val" / "ant" / "._0.JPEG").write_bytes(b"metadata of macOS")
    (photo_folders / "val" / "ant" / "notes.txt").write_text("not an image")
    (photo_folders / "val" / ".hidden").mkdir()
    os.rename(photo_folders / "val" / "ant" / "0.JPEG", os.fsencode(photo_folders / "val" / "ant") + b"/\xff.JPEG")
    data = load_small(photo_folders, "imagenet", size=16)
    assert data.sizes == (21, 10) and len(torch.cat([labels for _, labels in data.test()])) == 10 and data.skipped == 0


def make_folders(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).mkdir(parents=True)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda folder: make_folders(folder, "train/dog"),
            "val lacks the class dog of train; expected the same classes in both",
        ),
        (lambda folder: make_folders(folder, "val/dog", "val/eel"), "train lacks the class dog of val (and 1 more differ)"),
        (
            lambda folder: make_folders(folder, "train/dog", "val/dog"),
            "train/dog has no images; expected files such as *.JPEG or *.png",
        ),
        (lambda folder: os.rename(folder / "val", folder / "value"), "has no train and val folders"),
        (
            lambda folder: (os.rename(folder / "val", folder / "old"), make_folders(folder, "val")),
            "val has no folders; expected one per class",
        ),
    ],
)
def test_image_folders_are_checked(photo_folders: Path, change: Callable[[Path], None], message: str) -> None:
    change(photo_folders)
    with pytest.raises((ValueError, FileNotFoundError)) as caught:
        load_small(photo_folders, "imagenet")
    assert message in str(caught.value)
