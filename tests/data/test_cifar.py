"""Reading and downloading CIFAR, with small files. If OPTG_DATA is a folder with the real CIFAR, that is tested, too."""

import io
import os
import pickle
import tarfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from optg.data import cifar, own
from tests.data.small_data import COUNTS, equal_batches, load_small, md5, pickle_like_python2, write_form


@pytest.mark.parametrize("name", COUNTS)
def test_cifar_is_read_as_written(small_cifars: Path, name: str) -> None:
    data, kind = load_small(small_cifars, name, batch_size=COUNTS[name][1]), cifar.CIFARS[name]
    assert data.classes == kind.classes and data.shape == (3, 32, 32) and data.sizes == COUNTS[name]
    content = (small_cifars / kind.binary.folder / next(iter(kind.binary.test))).read_bytes()
    ((images, labels),) = data.test()
    for i, record in enumerate(
        content[k : k + kind.label_bytes + 3072] for k in range(0, len(content), kind.label_bytes + 3072)
    ):
        assert labels[i] == record[kind.label_bytes - 1]
        for c, y, x in ((0, 0, 0), (1, 2, 3), (2, 31, 30)):
            pixel = record[kind.label_bytes + 1024 * c + 32 * y + x]
            assert images[i, c, y, x].item() == pytest.approx((pixel / 255 - kind.mean[c]) / kind.std[c], abs=1e-5)


@pytest.mark.parametrize("by_columns", [False, True])
@pytest.mark.parametrize("name", COUNTS)
def test_the_python_form_gives_the_same_images(
    small_cifars: Path, monkeypatch: pytest.MonkeyPatch, name: str, by_columns: bool
) -> None:
    kind, expected = cifar.CIFARS[name], load_small(small_cifars, name)
    binary = small_cifars / kind.binary.folder
    contents = [(binary / file).read_bytes() for file in (*kind.binary.train, *kind.binary.test)]
    pickled = [pickle_like_python2(content, kind.label_bytes, kind.label_key, by_columns) for content in contents]
    form = write_form(small_cifars / "below" / "one", kind.python, pickled)
    monkeypatch.setitem(cifar.CIFARS, name, replace(kind, python=form))
    data = load_small(small_cifars / "below", name)  # found one level down
    assert equal_batches(list(data.train(0)), list(expected.train(0))) and equal_batches(
        list(data.test()), list(expected.test())
    )


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
        (b"(S'./victim'\nios\nmkdir\n.", "os.mkdir"),  # a call in protocol 0
        (b"\x80\x04\x8c\x05numpy\x8c\x0endarray.tofile\x93.", "numpy.ndarray.tofile"),
        (b"cnumpy\nload\n(S'./victim'\ntR.", "numpy.load"),
        (b"cnumpy.core.multiarray\nscalar\n.", "numpy.core.multiarray.scalar"),
    ],
)
def test_nothing_in_a_pickle_is_run(small_cifars: Path, monkeypatch: pytest.MonkeyPatch, content: bytes, names: str) -> None:
    victim, kind = small_cifars / "victim", cifar.CIFARS["cifar100"]
    form = write_form(small_cifars / "hostile", kind.python, [content, content])
    monkeypatch.setitem(cifar.CIFARS, "cifar100", replace(kind, python=form))
    monkeypatch.chdir(small_cifars)
    with pytest.raises(ValueError, match=r"not a file of CIFAR-100: it asks for .*not run") as caught:
        load_small(small_cifars / "hostile", "cifar100")
    assert names in str(caught.value) and not victim.exists()


@pytest.mark.parametrize("content", [b"", b"junk", b"\x80\x02}.", b"\x80\x02}(U\x04dataK\x01u.", b"cnumpy\nndarray\n}b."])
def test_a_pickle_of_something_else_is_refused(small_cifars: Path, monkeypatch: pytest.MonkeyPatch, content: bytes) -> None:
    kind = cifar.CIFARS["cifar100"]
    form = write_form(small_cifars / "other", kind.python, [content, content])
    monkeypatch.setitem(cifar.CIFARS, "cifar100", replace(kind, python=form))
    with pytest.raises(ValueError, match="cifar-100-python/train is not a file of CIFAR-100"):
        load_small(small_cifars / "other", "cifar100")


def test_a_damaged_file_is_refused(small_cifars: Path) -> None:
    path = small_cifars / "cifar-10-batches-bin" / "data_batch_3.bin"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ValueError, match=r"data_batch_3.bin is damaged: its md5 is .*, expected .*official file there"):
        load_small(small_cifars, "cifar10")


def test_a_missing_file_is_named(small_cifars: Path) -> None:
    (small_cifars / "cifar-10-batches-bin" / "test_batch.bin").unlink()
    with pytest.raises(FileNotFoundError, match=r"CIFAR-10 is incomplete: .*cifar-10-batches-bin lacks test_batch.bin. Put"):
        load_small(small_cifars, "cifar10")


def write_archive(path: Path, members: dict[str, bytes | str]) -> str:
    """Write a .tar.gz of files (bytes) and links (text), and return its md5."""
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


def serve_archive(small_cifars: Path, monkeypatch: pytest.MonkeyPatch, members: dict[str, bytes | str], **changes: str) -> None:
    """Make the archive of CIFAR-100 contain these members."""
    path = small_cifars / "archive.tar.gz"
    changed = {"archive": path.as_uri(), "archive_md5": write_archive(path, members)} | changes
    monkeypatch.setitem(cifar.CIFARS, "cifar100", replace(cifar.CIFARS["cifar100"], **changed))


def official_files(small_cifars: Path) -> dict[str, bytes | str]:
    files = ("cifar-100-binary/train.bin", "cifar-100-binary/test.bin")
    return {file: (small_cifars / file).read_bytes() for file in files}


def test_missing_files_are_downloaded(small_cifars: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    extra: dict[str, bytes | str] = {"../escaped": b"x", "/tmp/escaped": b"x", "cifar-100-binary/../../escaped": b"x"}
    serve_archive(small_cifars, monkeypatch, extra | official_files(small_cifars) | {"cifar-100-binary/readme.html": b"x"})
    there, expected = small_cifars / "new" / "folder", load_small(small_cifars, "cifar100")
    assert equal_batches(list(load_small(there, "cifar100").train(0)), list(expected.train(0)))
    assert sorted(path.relative_to(there).as_posix() for path in there.rglob("*")) == [
        "cifar-100-binary",
        "cifar-100-binary/test.bin",
        "cifar-100-binary/train.bin",
    ]
    assert not list(small_cifars.rglob("escaped"))
    monkeypatch.setattr(cifar, "fetch", None)  # the second time, nothing is downloaded
    load_small(there, "cifar100")


def test_one_process_downloads_and_the_others_wait(small_cifars: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    serve_archive(small_cifars, monkeypatch, official_files(small_cifars))
    fetch, there, fetches = cifar.fetch, small_cifars / "new", []

    def slow(url: str, path: Path) -> None:
        fetches.append(path)
        time.sleep(0.2)
        fetch(url, path)

    monkeypatch.setattr(cifar, "fetch", slow)
    with ThreadPoolExecutor(3) as threads:
        assert [data.sizes for data in threads.map(lambda _: load_small(there, "cifar100"), range(3))] == [
            COUNTS["cifar100"]
        ] * 3
    assert len(fetches) == 1


def test_without_locks_the_first_download_is_used(small_cifars: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    serve_archive(small_cifars, monkeypatch, official_files(small_cifars))
    fetch, there = cifar.fetch, small_cifars / "new"

    def refuse(*_: Any) -> None:
        raise OSError("no locks available")

    def slow(url: str, path: Path) -> None:
        monkeypatch.setattr(cifar, "fetch", fetch)
        load_small(there, "cifar100")  # another process finishes first
        fetch(url, path)

    monkeypatch.setattr("fcntl.flock", refuse)
    monkeypatch.setattr(cifar, "fetch", slow)
    assert load_small(there, "cifar100").sizes == COUNTS["cifar100"]


@pytest.mark.parametrize(
    ("members", "changes", "message"),
    [
        ({}, {"archive": "file:///no/such/archive.tar.gz"}, "No such file"),
        ({}, {"archive_md5": "0" * 32}, f"the md5 of the download is .*, expected {'0' * 32}"),
        ({"cifar-100-binary/test.bin": None}, {}, "the archive has no file cifar-100-binary/test.bin"),
        ({"cifar-100-binary/test.bin": "/etc/passwd"}, {}, "cifar-100-binary/test.bin"),
        ({"cifar-100-binary/test.bin": "../../etc/passwd"}, {}, "cifar-100-binary/test.bin"),
    ],
)
def test_a_failed_download_says_which_files_to_put_where(
    small_cifars: Path, monkeypatch: pytest.MonkeyPatch, members: dict[str, Any], changes: dict[str, str], message: str
) -> None:
    whole = official_files(small_cifars) | members
    serve_archive(
        small_cifars, monkeypatch, {name: content for name, content in whole.items() if content is not None}, **changes
    )
    with pytest.raises(FileNotFoundError, match=message) as caught:
        load_small(small_cifars / "new", "cifar100")
    assert f"Put train.bin, test.bin into {small_cifars / 'new' / 'cifar-100-binary'}" in str(caught.value)
    assert not (small_cifars / "new").exists()  # no partial download is left


@pytest.mark.parametrize(("name", "first"), [("cifar10", [6, 9, 9, 4, 1]), ("cifar100", [19, 29, 0, 11, 1])])
def test_real_cifar(name: str, first: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, kind = os.environ.get("OPTG_DATA"), cifar.CIFARS[name]
    if not folder or not cifar.find(kind, Path(folder)):
        pytest.skip(f"OPTG_DATA is not a folder with {kind.title}")
    data = load_small(Path(folder), name, batch_size=500)
    assert data.sizes == (50_000, 10_000) and data.labels[:5].tolist() == first
    assert data.labels.bincount().tolist() == [50_000 // kind.classes] * kind.classes
    mean, std = own.statistics(data.images)
    assert [value / 255 for value in mean] == pytest.approx(kind.mean, abs=6e-5)
    assert [value / 255 for value in std] == pytest.approx(kind.std, abs=6e-5)
    images, _ = next(data.train(0))
    assert images.shape == (500, 3, 32, 32) and images.mean().abs() < 0.5
    if (found := cifar.find(kind, Path(folder))) and found[0] is kind.binary:  # convert it to the python form
        contents = [(found[1] / file).read_bytes() for file in (*kind.binary.train, *kind.binary.test)]
        form = write_form(
            tmp_path, kind.python, [pickle_like_python2(content, kind.label_bytes, kind.label_key) for content in contents]
        )
        monkeypatch.setitem(cifar.CIFARS, name, replace(kind, python=form))
        again = load_small(tmp_path, name, batch_size=500)
        assert torch.equal(again.images, data.images) and torch.equal(again.labels, data.labels)
        assert torch.equal(again.test_images, data.test_images) and torch.equal(again.test_labels, data.test_labels)
