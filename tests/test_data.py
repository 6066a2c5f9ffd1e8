"""The datasets, on small files made here. OPTG_DATA may name a folder with the real CIFAR, for one test more."""

import hashlib
import io
import os
import pickle
import random
import struct
import tarfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from optg.data import Data, cifar, digits, imagenet, load, own
from optg.data.augment import crop_and_flip, normalise

Batches = list[tuple[Tensor, Tensor]]
COUNTS = {"cifar10": (100, 23), "cifar100": (90, 23)}  # images for training and testing in the small sets


def md5(content: bytes) -> str:
    return hashlib.md5(content).hexdigest()


def rows(count: int, label_bytes: int, seed: int) -> bytes:
    made = np.random.RandomState(seed).randint(0, 256, (count, label_bytes + 3072)).astype(np.uint8)
    made[:, :label_bytes] = made[:, :label_bytes] % 10
    return made.tobytes()


def python2(rows: bytes, label_bytes: int, label_key: bytes, by_columns: bool = False) -> bytes:
    """A batch as Python 2 and the NumPy of its day pickled it, opcode by opcode."""
    table = np.frombuffer(rows, np.uint8).reshape(-1, label_bytes + 3072)
    labels = b"".join(b"K" + bytes([label]) for label in table[:, label_bytes - 1])
    pixels = table[:, label_bytes:].tobytes("F" if by_columns else "C")
    shape = b"M" + struct.pack("<H", len(table)) + b"M" + struct.pack("<H", 3072) + b"\x86"
    dtype = b"cnumpy\ndtype\nU\x02u1K\x00K\x01\x87R(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
    array = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85U\x01b\x87R(K\x01" + shape + dtype
    array += (b"\x88" if by_columns else b"\x89") + b"T" + struct.pack("<i", len(pixels)) + pixels + b"tb"
    key = b"U" + bytes([len(label_key)]) + label_key
    return b"\x80\x02}(U\x04data" + array + key + b"](" + labels + b"eu."


def write(folder: Path, form: cifar.Form, contents: list[bytes]) -> cifar.Form:
    """Files with these contents, and the form that expects them."""
    names = [*form.train, *form.test]
    (folder / form.folder).mkdir(parents=True)
    for name, content in zip(names, contents):
        (folder / form.folder / name).write_bytes(content)
    sums = dict(zip(names, map(md5, contents)))
    return replace(form, train={n: sums[n] for n in form.train}, test={n: sums[n] for n in form.test})


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with binary CIFARs of a few random images, which the library takes for the official ones."""
    for name, (train, test) in COUNTS.items():
        kind = cifar.CIFARS[name]
        parts = [train // len(kind.binary.train)] * len(kind.binary.train) + [test]
        contents = [rows(count, kind.label_bytes, seed) for seed, count in enumerate(parts)]
        monkeypatch.setitem(
            cifar.CIFARS, name, replace(kind, binary=write(tmp_path, kind.binary, contents), archive="file:///none")
        )
    return tmp_path


def picture(path: Path, colour: int, size: tuple[int, int] = (50, 40)) -> None:
    """Smooth, so that JPEG keeps it, with its class in the red channel."""
    across, down = np.meshgrid(np.linspace(0, 255, size[0]), np.linspace(0, 255, size[1]))
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.stack([np.full_like(across, colour), across, down], 2).astype(np.uint8)).save(path)


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Three classes, each of its own red, with 7 images for training and 3 for testing, one of them grey and one with alpha."""
    for label, name in enumerate(("ant", "bee", "cat")):
        for split, count in (("train", 7), ("val", 3)):
            for i in range(count):
                picture(tmp_path / split / name / f"{i}.{('JPEG', 'png', 'webp')[i % 3]}", 100 * label, (50 + i, 40 - 3 * i))
    grey = Image.open(tmp_path / "train" / "ant" / "0.JPEG").getchannel(0)
    grey.save(tmp_path / "train" / "ant" / "0.JPEG")
    bee = Image.open(tmp_path / "train" / "bee" / "1.png")
    bee.putalpha(50)
    bee.save(tmp_path / "train" / "bee" / "1.png")
    return tmp_path


def get(folder: Path, name: str, **options: Any) -> Data:
    return load(name, folder, **{"batch_size": 8, "device": "cpu", "seed": 3, "workers": 0} | options)


def same(a: Batches, b: Batches) -> bool:
    return len(a) == len(b) and all(torch.equal(x, u) and torch.equal(y, v) for (x, y), (u, v) in zip(a, b))


@pytest.fixture(params=["digits", "cifar10", "cifar100", "synthetic", "imagenet"])
def make(request: pytest.FixtureRequest) -> Callable[..., Data]:
    """Each dataset in turn, as a function of the options."""
    name = request.param
    folder = request.getfixturevalue({"cifar10": "small", "cifar100": "small", "imagenet": "photos"}.get(name, "tmp_path"))
    size = {"size": 16} if name == "imagenet" else {}
    return lambda **options: get(folder, name, **size | options)


# What holds for every dataset


def test_batches(make: Callable[..., Data]) -> None:
    data = make()
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


def test_an_epoch_is_a_function_of_seed_and_epoch(make: Callable[..., Data]) -> None:
    data = make()
    first = list(data.train(0))
    assert same(first, list(data.train(0))) and same(first, list(make().train(0)))
    assert not same(first, list(data.train(1))) and not same(first, list(make(seed=4).train(0)))
    assert same(list(data.test()), list(make(seed=4).test()))


def test_a_resumed_epoch_goes_on_with_the_same_batches(make: Callable[..., Data]) -> None:
    data = make()
    assert same(list(data.train(2, start=1)), list(data.train(2))[1:])
    assert list(data.train(2, start=data.steps_per_epoch)) == []
    with pytest.raises(ValueError, match=f"start is {data.steps_per_epoch + 1}; expected 0 to {data.steps_per_epoch}"):
        next(data.train(2, start=data.steps_per_epoch + 1))


@pytest.mark.parametrize("world", [2, 4, 8])
def test_ranks_share_the_batches_of_one(make: Callable[..., Data], world: int) -> None:
    one, ranks = make(), [make(rank=rank, world=world) for rank in range(world)]

    def joined(parts: list[Iterator[tuple[Tensor, Tensor]]]) -> Batches:
        return [(torch.cat([x for x, _ in shares]), torch.cat([y for _, y in shares])) for shares in zip(*parts, strict=True)]

    assert same(joined([rank.train(1) for rank in ranks]), list(one.train(1)))
    assert same(joined([rank.test() for rank in ranks]), list(one.test()))
    assert all(len(labels) == 8 // world for rank in ranks for _, labels in rank.train(1))


def test_global_random_numbers_are_left_alone(make: Callable[..., Data]) -> None:
    before, numpy_before, python_before = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
    data = make()
    list(data.train(0)), list(data.test())
    assert torch.equal(before, torch.get_rng_state())
    assert numpy_before == np.random.get_state()[1].tolist() and python_before == random.getstate()


# In memory


def test_an_epoch_has_each_image_once(small: Path) -> None:
    data = get(small, "cifar10", batch_size=20, augment=False)
    seen = torch.cat([images for images, _ in data.train(0)])
    stored = normalise(data.images, data.mean, data.std)
    assert sorted(seen.sum((1, 2, 3)).tolist()) == sorted(stored.sum((1, 2, 3)).tolist())


def test_digits_are_those_of_the_examples() -> None:
    (images, labels), test = digits.load()
    data = get(Path(), "digits", batch_size=360)
    assert data.classes == 10 and data.shape == (1, 8, 8) and data.sizes == (1437, 360)
    assert same(list(data.test()), [test])
    order = torch.cat([labels for _, labels in data.train(0)])
    assert not torch.equal(order, labels[: len(order)])
    assert torch.equal(normalise(data.images, data.mean, data.std), images)


@pytest.mark.parametrize("name", COUNTS)
def test_cifar_is_read_as_it_is_written(small: Path, name: str) -> None:
    data, kind = get(small, name, batch_size=COUNTS[name][1]), cifar.CIFARS[name]
    assert data.classes == kind.classes and data.shape == (3, 32, 32) and data.sizes == COUNTS[name]
    content = (small / kind.binary.folder / next(iter(kind.binary.test))).read_bytes()
    ((images, labels),) = data.test()
    for i, record in enumerate(
        content[k : k + kind.label_bytes + 3072] for k in range(0, len(content), kind.label_bytes + 3072)
    ):
        assert labels[i] == record[kind.label_bytes - 1]
        for c, y, x in ((0, 0, 0), (1, 2, 3), (2, 31, 30)):
            pixel = record[kind.label_bytes + 1024 * c + 32 * y + x]
            assert images[i, c, y, x].item() == pytest.approx((pixel / 255 - kind.mean[c]) / kind.std[c], abs=1e-5)


def test_crop_and_flip_against_a_loop() -> None:
    chance = torch.Generator().manual_seed(0)
    images = torch.randint(1, 256, (9, 3, 5, 7), dtype=torch.uint8, generator=chance)  # not square; 0 is the frame alone
    index = torch.randint(9, (200,), generator=chance)
    top, left = torch.randint(5, (2, 200), generator=chance)
    flip = torch.randint(2, (200,), generator=chance).bool()
    made = crop_and_flip(images, index, top, left, flip, pad=2)
    for n in range(200):
        frame = torch.zeros(3, 9, 11, dtype=torch.uint8)
        frame[:, 2:7, 2:9] = images[index[n]]
        cut = frame[:, top[n] : top[n] + 5, left[n] : left[n] + 7]
        assert torch.equal(made[n], cut.flip(2) if flip[n] else cut)


def test_crops_and_flips_are_all_drawn_equally_often(small: Path) -> None:
    data = get(small, "cifar10")
    _, top, left, flip = (torch.cat(drawn) for drawn in zip(*(data.draw(epoch) for epoch in range(200))))  # 20,000 images
    for offset in (top, left):
        counts = offset.bincount(minlength=9)
        assert len(counts) == 9 and (counts - 20_000 / 9).abs().max() < 5 * (20_000 / 9) ** 0.5
    assert abs(flip.float().mean().item() - 0.5) < 5 * 0.5 / 20_000**0.5


def test_training_images_are_the_augmented_ones(small: Path) -> None:
    data = get(small, "cifar10")
    order, top, left, flip = data.draw(5)
    for step, (images, labels) in enumerate(data.train(5)):
        at = slice(8 * step, 8 * step + 8)
        cut = crop_and_flip(data.images, order[at], top[at], left[at], flip[at], 4)
        assert torch.equal(images, normalise(cut, data.mean, data.std)) and torch.equal(labels, data.labels[order[at]])


def test_synthetic_shapes() -> None:
    data = get(Path(), "synthetic:1x6x5:3:40")
    assert (data.shape, data.classes, data.sizes) == ((1, 6, 5), 3, (40, 10))
    images = torch.cat([images for images, _ in get(Path(), "synthetic").train(0)])
    assert abs(images.mean().item()) < 0.01 and abs(images.std().item() - 1) < 0.01


# CIFAR's files


@pytest.mark.parametrize("by_columns", [False, True])
@pytest.mark.parametrize("name", COUNTS)
def test_the_python_form_holds_the_same(small: Path, monkeypatch: pytest.MonkeyPatch, name: str, by_columns: bool) -> None:
    kind, expected = cifar.CIFARS[name], get(small, name)
    binary = small / kind.binary.folder
    contents = [(binary / file).read_bytes() for file in (*kind.binary.train, *kind.binary.test)]
    pickled = [python2(content, kind.label_bytes, kind.label_key, by_columns) for content in contents]
    form = write(small / "below" / "one", kind.python, pickled)
    monkeypatch.setitem(cifar.CIFARS, name, replace(kind, python=form))
    data = get(small / "below", name)  # found one level down
    assert same(list(data.train(0)), list(expected.train(0))) and same(list(data.test()), list(expected.test()))


class Hostile:
    def __init__(self, *call: Any) -> None:
        self.call = call

    def __reduce__(self) -> Any:
        return self.call


@pytest.mark.parametrize(
    ("content", "names"),
    [
        (pickle.dumps(Hostile(os.mkdir, ("./victim",)), 2), ".mkdir"),
        (pickle.dumps(Hostile(os.mkdir, ("./victim",)), 4), ".mkdir"),
        (pickle.dumps({"data": Hostile(eval, ("__import__('os').mkdir('./victim')",))}, 2), "eval"),
        (b"(S'./victim'\nios\nmkdir\n.", "os.mkdir"),  # as protocol 0 calls
        (b"\x80\x04\x8c\x05numpy\x8c\x0endarray.tofile\x93.", "numpy.ndarray.tofile"),
        (b"cnumpy\nload\n(S'./victim'\ntR.", "numpy.load"),
        (b"cnumpy.core.multiarray\nscalar\n.", "numpy.core.multiarray.scalar"),
    ],
)
def test_nothing_in_a_pickle_is_run(small: Path, monkeypatch: pytest.MonkeyPatch, content: bytes, names: str) -> None:
    victim, kind = small / "victim", cifar.CIFARS["cifar100"]
    form = write(small / "hostile", kind.python, [content, content])
    monkeypatch.setitem(cifar.CIFARS, "cifar100", replace(kind, python=form))
    monkeypatch.chdir(small)
    with pytest.raises(ValueError, match=r"not a file of CIFAR-100: it asks for .*not run") as caught:
        get(small / "hostile", "cifar100")
    assert names in str(caught.value) and not victim.exists()


@pytest.mark.parametrize("content", [b"", b"junk", b"\x80\x02}.", b"\x80\x02}(U\x04dataK\x01u.", b"cnumpy\nndarray\n}b."])
def test_a_pickle_of_something_else_is_named(small: Path, monkeypatch: pytest.MonkeyPatch, content: bytes) -> None:
    kind = cifar.CIFARS["cifar100"]
    form = write(small / "other", kind.python, [content, content])
    monkeypatch.setitem(cifar.CIFARS, "cifar100", replace(kind, python=form))
    with pytest.raises(ValueError, match="cifar-100-python/train is not a file of CIFAR-100"):
        get(small / "other", "cifar100")


def test_a_damaged_file_is_named(small: Path) -> None:
    path = small / "cifar-10-batches-bin" / "data_batch_3.bin"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ValueError, match=r"data_batch_3.bin is damaged: its md5 is .*, expected .*official file there"):
        get(small, "cifar10")


def test_a_missing_file_is_named(small: Path) -> None:
    (small / "cifar-10-batches-bin" / "test_batch.bin").unlink()
    with pytest.raises(FileNotFoundError, match=r"CIFAR-10 is incomplete: .*cifar-10-batches-bin lacks test_batch.bin. Put"):
        get(small, "cifar10")


def archive(path: Path, members: dict[str, bytes | str]) -> str:
    """A .tar.gz of files (bytes) and links (text), and its md5."""
    with tarfile.open(path, "w:gz") as tar:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            if isinstance(content, str):
                info.type, info.linkname = tarfile.SYMTYPE, content
                tar.addfile(info)
            else:
                info.size = len(content)
                tar.addfile(info, io.BytesIO(content))
    return md5(path.read_bytes())


def served(small: Path, monkeypatch: pytest.MonkeyPatch, members: dict[str, bytes | str], **changes: str) -> None:
    """Have CIFAR-100's archive hold these members."""
    path = small / "archive.tar.gz"
    changed = {"archive": path.as_uri(), "archive_md5": archive(path, members)} | changes
    monkeypatch.setitem(cifar.CIFARS, "cifar100", replace(cifar.CIFARS["cifar100"], **changed))


def official(small: Path) -> dict[str, bytes | str]:
    files = ("cifar-100-binary/train.bin", "cifar-100-binary/test.bin")
    return {file: (small / file).read_bytes() for file in files}


def test_what_is_not_there_is_downloaded(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    extra: dict[str, bytes | str] = {"../escaped": b"x", "/tmp/escaped": b"x", "cifar-100-binary/../../escaped": b"x"}
    served(small, monkeypatch, extra | official(small) | {"cifar-100-binary/readme.html": b"x"})
    there, expected = small / "new" / "folder", get(small, "cifar100")
    assert same(list(get(there, "cifar100").train(0)), list(expected.train(0)))
    assert sorted(path.relative_to(there).as_posix() for path in there.rglob("*")) == [
        "cifar-100-binary",
        "cifar-100-binary/test.bin",
        "cifar-100-binary/train.bin",
    ]
    assert not list(small.rglob("escaped"))
    monkeypatch.setattr(cifar, "fetch", None)  # the second time, nothing is fetched
    get(there, "cifar100")


def test_one_of_several_downloads_and_the_others_wait(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    served(small, monkeypatch, official(small))
    fetch, there, fetches = cifar.fetch, small / "new", []

    def slow(url: str, path: Path) -> None:
        fetches.append(path)
        time.sleep(0.2)
        fetch(url, path)

    monkeypatch.setattr(cifar, "fetch", slow)
    with ThreadPoolExecutor(3) as threads:
        assert [data.sizes for data in threads.map(lambda _: get(there, "cifar100"), range(3))] == [COUNTS["cifar100"]] * 3
    assert len(fetches) == 1


def test_where_a_disk_cannot_lock_the_first_one_counts(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    served(small, monkeypatch, official(small))
    fetch, there = cifar.fetch, small / "new"

    def refuse(*_: Any) -> None:
        raise OSError("no locks available")

    def slow(url: str, path: Path) -> None:
        monkeypatch.setattr(cifar, "fetch", fetch)
        get(there, "cifar100")  # the other is through before this one begins
        fetch(url, path)

    monkeypatch.setattr("fcntl.flock", refuse)
    monkeypatch.setattr(cifar, "fetch", slow)
    assert get(there, "cifar100").sizes == COUNTS["cifar100"]


@pytest.mark.parametrize(
    ("members", "changes", "message"),
    [
        ({}, {"archive": "file:///no/such/archive.tar.gz"}, "No such file"),
        ({}, {"archive_md5": "0" * 32}, f"the md5 of what came is .*, expected {'0' * 32}"),
        ({"cifar-100-binary/test.bin": None}, {}, "the archive has no file cifar-100-binary/test.bin"),
        ({"cifar-100-binary/test.bin": "/etc/passwd"}, {}, "cifar-100-binary/test.bin"),
        ({"cifar-100-binary/test.bin": "../../etc/passwd"}, {}, "cifar-100-binary/test.bin"),
    ],
)
def test_a_failed_download_says_what_to_put_where(
    small: Path, monkeypatch: pytest.MonkeyPatch, members: dict[str, Any], changes: dict[str, str], message: str
) -> None:
    whole = official(small) | members
    served(small, monkeypatch, {name: content for name, content in whole.items() if content is not None}, **changes)
    with pytest.raises(FileNotFoundError, match=message) as caught:
        get(small / "new", "cifar100")
    assert f"Put train.bin, test.bin into {small / 'new' / 'cifar-100-binary'}" in str(caught.value)
    assert not (small / "new").exists()  # nothing half done is left


# ImageNet


def test_labels_belong_to_their_images(photos: Path) -> None:
    data = get(photos, "imagenet", size=16)
    assert (data.classes, data.shape, data.sizes) == (3, (3, 16, 16), (21, 9))
    for images, labels in (*data.train(0), *data.test()):
        red = (images[:, 0].mean((1, 2)) * imagenet.STD[0] + imagenet.MEAN[0]) * 255
        assert ((red - 100 * labels).abs() < 4).all()


def test_the_centre_is_what_resizing_and_cropping_leave(tmp_path: Path) -> None:
    for size in ((512, 320), (256, 300)):
        picture(tmp_path / "image.png", 30, size)
        with Image.open(tmp_path / "image.png") as image:
            short = min(size)
            resized = image.resize((size[0] * 256 // short, size[1] * 256 // short), Image.Resampling.BILINEAR)
        left, top = (resized.width - 224) // 2, (resized.height - 224) // 2
        expected = np.asarray(resized.crop((left, top, left + 224, top + 224))).transpose(2, 0, 1)
        made = imagenet.read(str(tmp_path / "image.png"), 224, None)
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
    assert imagenet.random_box(1000, 3, chance) == (498, 0, 502, 3)  # none of ten fits


def test_both_mirrorings_are_seen(photos: Path) -> None:
    data = get(photos, "imagenet", size=16)
    images = torch.cat([images for epoch in range(4) for images, _ in data.train(epoch)])
    rising = images[:, 1, :, -1].mean(1) > images[:, 1, :, 0].mean(1)  # green grows to the right
    assert 0.25 < rising.float().mean() < 0.75
    plain = torch.cat([images for images, _ in get(photos, "imagenet", size=16, augment=False).train(0)])
    assert (plain[:, 1, :, -1].mean(1) > plain[:, 1, :, 0].mean(1)).sum() >= len(plain) - 1  # all but the grey one


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_workers_make_what_one_process_makes(photos: Path) -> None:
    alone, data = get(photos, "imagenet", size=16), get(photos, "imagenet", size=16, workers=2)
    before = torch.get_rng_state()
    for epoch in range(2):
        assert same(list(data.train(epoch)), list(alone.train(epoch)))
        assert same(list(data.test()), list(alone.test()))
    stale = data.train(0)
    next(stale)  # left in the middle
    assert same(list(data.train(1, start=1)), list(alone.train(1))[1:])
    with pytest.raises(RuntimeError, match="one at a time"):
        next(stale)
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.parametrize("workers", [0, 2])
def test_an_unreadable_image_is_named_once_and_replaced(photos: Path, workers: int) -> None:
    data = get(photos, "imagenet", size=16, batch_size=21, augment=False, workers=workers)
    order = imagenet.shuffled(21, 3, 0).tolist()
    ((images, labels),) = get(photos, "imagenet", size=16, batch_size=21, augment=False).train(0)
    bad = [data.training.loader.dataset.files.path(order[i]) for i in (4, 5, 20)]  # two in a row, and the last
    Path(bad[0]).write_bytes(b"not an image")
    Path(bad[1]).write_bytes(Path(bad[1]).read_bytes()[:150])  # cut short
    Path(bad[2]).unlink()
    with pytest.warns(UserWarning) as caught:
        passes = [*data.train(0), *data.train(0), *data.train(1)]
    named = [str(w.message).split(" cannot be read (") for w in caught if "the next image takes its place" in str(w.message)]
    assert sorted(path for path, _ in named) == sorted(bad) and data.skipped == 3
    replaced = torch.tensor([6 if i in (4, 5) else 0 if i == 20 else i for i in range(21)])
    assert same(passes[:2], [(images[replaced], labels[replaced])] * 2)


def test_a_disk_that_fails_is_an_error(photos: Path) -> None:
    data = get(photos, "imagenet", size=16)
    for path in photos.glob("val/*/*"):
        path.unlink()
    with pytest.raises(OSError, match="is the disk still there"):
        list(data.test())


def test_names_that_are_no_text(photos: Path) -> None:
    picture(photos / "val" / "ant" / "ä ö.JPEG", 0)
    (photos / "val" / "ant" / "._0.JPEG").write_bytes(b"a Mac's notes")
    (photos / "val" / "ant" / "notes.txt").write_text("no image")
    (photos / "val" / ".hidden").mkdir()
    os.rename(photos / "val" / "ant" / "0.JPEG", os.fsencode(photos / "val" / "ant") + b"/\xff.JPEG")
    data = get(photos, "imagenet", size=16)
    assert data.sizes == (21, 10) and len(torch.cat([labels for _, labels in data.test()])) == 10 and data.skipped == 0


# One's own


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    """Writes a module with this function of a folder, and returns the name to load it by."""
    monkeypatch.syspath_prepend(tmp_path)

    def make(body: str) -> str:
        name = f"made_{md5(body.encode())}"
        (tmp_path / f"{name}.py").write_text(f"import torch\nfrom torch import zeros, ones\ndef data(folder):\n    {body}\n")
        return f"{name}:data"

    return make


def test_own_bytes_are_normalised_and_own_floats_are_not(module: Callable[[str], str], tmp_path: Path) -> None:
    images = "g = torch.Generator().manual_seed(0); x = torch.randint(9, 90, (40, 2, 6, 6), generator=g); x[:, 1] = 7"
    labels = "y = torch.arange(40) % 4; open(folder / 'seen', 'w')"
    name = module(f"{images}; {labels}; return (x.byte(), y), (x[:5].byte(), y[:5])")
    data = get(tmp_path, name)
    assert (data.classes, data.shape, data.sizes) == (4, (2, 6, 6), (40, 5)) and (tmp_path / "seen").exists()
    seen = torch.cat([images for images, _ in data.train(0)])
    assert seen[:, 0].mean().abs() < 1e-5 and abs(seen[:, 0].std(correction=0) - 1) < 1e-5 and not seen[:, 1].any()
    name = module(f"{images}; {labels}; return (x.double(), y), (x[:5].double(), y[:5])")
    ((images, _),) = get(tmp_path, name).test()
    assert images.dtype == torch.float32 and (images[:, 1] == 7).all()


def test_statistics_against_floats() -> None:
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
            "test images float32 [9, 1, 4, 5]; make them alike",
        ),
        (f"return (zeros(9, 1, 4, 4), {GOOD}), (zeros(9, 1, 4, 4).byte(), {GOOD})", "test images uint8 [9, 1, 4, 4]; make"),
    ],
)
def test_what_one_returns_is_checked(module: Callable[[str], str], tmp_path: Path, body: str, message: str) -> None:
    with pytest.raises(ValueError) as caught:
        get(tmp_path, module(body))
    assert message in str(caught.value)


# Errors


def empty(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).mkdir(parents=True)


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
        ("digits", {"size": 224}, "size is 224; digits has images of 8×8. Leave it out"),
        ("no_such_module:data", {}, "cannot import 'no_such_module'"),
        ("tests.toy:convnets", {}, "the module 'tests.small' has no function 'convnets'; did you mean 'convnet'?"),
        ("tests.toy:convnet", {}, "tests.small:convnet cannot be called with folder="),
        ("imagenet", {}, "put train/CLASS/*.JPEG and val/CLASS/*.JPEG there"),
    ],
)
def test_errors(tmp_path: Path, name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, FileNotFoundError)) as caught:
        get(tmp_path, name, **options)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda folder: empty(folder, "train/dog"), "val lacks the class dog of train; expected the same classes in both"),
        (lambda folder: empty(folder, "val/dog", "val/eel"), "train lacks the class dog of val (and 1 more differ)"),
        (
            lambda folder: empty(folder, "train/dog", "val/dog"),
            "train/dog has no images; expected files such as *.JPEG or *.png",
        ),
        (lambda folder: os.rename(folder / "val", folder / "value"), "there is no train and val in"),
        (
            lambda folder: (os.rename(folder / "val", folder / "old"), empty(folder, "val")),
            "val has no folders; expected one for each",
        ),
    ],
)
def test_folders_of_images_are_checked(photos: Path, change: Callable[[Path], None], message: str) -> None:
    change(photos)
    with pytest.raises((ValueError, FileNotFoundError)) as caught:
        get(photos, "imagenet")
    assert message in str(caught.value)


# On a GPU


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("name", ["digits", "cifar10", "imagenet"])
def test_a_gpu_sees_the_same(request: pytest.FixtureRequest, name: str) -> None:
    folder = request.getfixturevalue("photos" if name == "imagenet" else "small")
    host, device = (get(folder, name, device=device) for device in ("cpu", "cuda"))
    for mine, others in ((host.train(1), device.train(1)), (host.test(), device.test())):
        assert same(list(mine), [(images.cpu(), labels.cpu()) for images, labels in others])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_batches_need_no_sync_and_can_be_captured(small: Path) -> None:
    data = get(small, "cifar10", device="cuda")
    batches = data.train(0)
    next(batches)  # an epoch's random numbers are moved with its first batch
    torch.cuda.set_sync_debug_mode("error")
    try:
        list(batches)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    at = [drawn[:8].clone() for drawn in data.draw(0)]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        images = normalise(crop_and_flip(data.images, *at, pad=4), data.mean, data.std)
    for step, (expected, _) in enumerate(data.train(1)):
        for buffer, drawn in zip(at, data.draw(1)):
            buffer.copy_(drawn[8 * step : 8 * step + 8])
        graph.replay()
        assert torch.equal(images, expected)


# The real thing


@pytest.mark.parametrize(("name", "first"), [("cifar10", [6, 9, 9, 4, 1]), ("cifar100", [19, 29, 0, 11, 1])])
def test_real_cifar(name: str, first: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, kind = os.environ.get("OPTG_DATA"), cifar.CIFARS[name]
    if not folder or not cifar.find(kind, Path(folder)):
        pytest.skip(f"OPTG_DATA names no folder with {kind.title}")
    data = get(Path(folder), name, batch_size=500)
    assert data.sizes == (50_000, 10_000) and data.labels[:5].tolist() == first
    assert data.labels.bincount().tolist() == [50_000 // kind.classes] * kind.classes
    mean, std = own.statistics(data.images)
    assert [value / 255 for value in mean] == pytest.approx(kind.mean, abs=6e-5)
    assert [value / 255 for value in std] == pytest.approx(kind.std, abs=6e-5)
    images, _ = next(data.train(0))
    assert images.shape == (500, 3, 32, 32) and images.mean().abs() < 0.5
    if (found := cifar.find(kind, Path(folder))) and found[0] is kind.binary:  # the python form, made from it
        contents = [(found[1] / file).read_bytes() for file in (*kind.binary.train, *kind.binary.test)]
        form = write(tmp_path, kind.python, [python2(content, kind.label_bytes, kind.label_key) for content in contents])
        monkeypatch.setitem(cifar.CIFARS, name, replace(kind, python=form))
        again = get(tmp_path, name, batch_size=500)
        assert torch.equal(again.images, data.images) and torch.equal(again.labels, data.labels)
        assert torch.equal(again.test_images, data.test_images) and torch.equal(again.test_labels, data.test_labels)
