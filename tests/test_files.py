import errno
import os
import time
from pathlib import Path

import pytest

from optg.files import (
    Fingerprint,
    atomic_file,
    atomic_write,
    create,
    exists,
    fingerprint,
    free_name,
    list_names,
    naming,
    read_bytes,
    set_aside,
)


def test_a_file_is_hashed_while_it_is_written_and_read(tmp_path):
    content = os.urandom(3_000_001)
    with atomic_file(tmp_path / "a") as file:
        for start in range(0, len(content), 700_000):
            file.write(content[start : start + 700_000])
    assert (tmp_path / "a").read_bytes() == content
    assert file.fingerprint == Fingerprint.of(content) == fingerprint(tmp_path / "a") and file.fingerprint.size == 3_000_001


def test_hashing_100_megabytes_takes_a_tenth_of_a_second(tmp_path):
    flags = Path("/proc/cpuinfo").read_text().split() if Path("/proc/cpuinfo").exists() else []
    limit = 0.1 if "sha_ni" in flags or "sha2" in flags else 1.0
    (tmp_path / "a").write_bytes(bytes(100_000_000))
    seconds = []
    for _ in range(5):
        start = time.process_time()
        fingerprint(tmp_path / "a")
        seconds.append(time.process_time() - start)
    assert min(seconds) < limit


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path):
    (tmp_path / "a").write_text("old")
    for write in (atomic_file, atomic_write):
        with pytest.raises(RuntimeError), write(tmp_path / "a"):
            raise RuntimeError
    assert (tmp_path / "a").read_text() == "old" and list_names(tmp_path) == ["a"]


def test_no_link_is_written_through(tmp_path):
    (tmp_path / "precious").write_text("precious")
    for name in ("a", f".a.{os.getpid()}.partial"):
        (tmp_path / name).symlink_to(tmp_path / "precious")
    with atomic_write(tmp_path / "a") as partial:
        partial.write_text("new")
    assert (tmp_path / "a").read_text() == "new" and not (tmp_path / "a").is_symlink()
    (tmp_path / "broken").symlink_to(tmp_path / "nowhere")
    with pytest.raises(FileExistsError):
        create(tmp_path / "broken")
    assert (tmp_path / "precious").read_text() == "precious" and not (tmp_path / "nowhere").exists()


def test_only_regular_files_are_read(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    for path in (tmp_path / "fifo", tmp_path):
        with pytest.raises(OSError, match=f"Not a regular file: '{path}'"):
            read_bytes(path)


def test_errors_name_the_path_and_keep_their_kind(tmp_path):
    with pytest.raises(FileNotFoundError, match=f"No such file or directory: '{tmp_path}/a'"):
        read_bytes(tmp_path / "a")
    with pytest.raises(OSError, match="Input/output error: 'there'") as error, naming("there"):
        raise OSError(errno.EIO, os.strerror(errno.EIO))
    assert error.value.errno == errno.EIO


def test_a_missing_folder_is_named_not_the_temporary_file(tmp_path):
    expected = f"^there is no folder {tmp_path}/no to write m.optg into$"
    with pytest.raises(FileNotFoundError, match=expected), atomic_write(tmp_path / "no" / "m.optg"):
        pass


def test_names_are_never_taken_twice(tmp_path):
    for end in ("", "-1", "-2"):
        (tmp_path / "a").write_text(end)
        assert set_aside(tmp_path / "a").name == f"a.damaged{end}"
    (tmp_path / "b").symlink_to(tmp_path / "nowhere")
    assert exists(tmp_path / "b") and free_name(tmp_path / "b").name == "b-1"


def test_a_missing_folder_has_no_names_but_an_unreadable_one_is_an_error(tmp_path, monkeypatch):
    assert list_names(tmp_path / "nothing") == []

    def failing(path):
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(os, "listdir", failing)
    with pytest.raises(PermissionError):
        list_names(tmp_path)
