"""Read and write files so that a crash leaves no half-written one, and nothing is written through a symbolic link.

Errors name the path: those of `read` and `write` would not. Every byte is hashed once, while it is read or written.
"""

import errno
import hashlib
import json
import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

SET_ASIDE = re.compile(r".+\.damaged(-\d+)?")  # the names that `set_aside` gives
BLOCK = 1 << 20  # bytes read at a time: small enough for the CPU's cache


@dataclass(frozen=True)
class Fingerprint:
    """The size and SHA-256 of a file."""

    size: int
    sha256: str

    @classmethod
    def of(cls, data: bytes) -> "Fingerprint":
        return cls(len(data), hashlib.sha256(data).hexdigest())


class HashedFile:
    """A file that is hashed while it is read or written."""

    def __init__(self, file: BinaryIO) -> None:
        self.file, self.size, self.sha256 = file, 0, hashlib.sha256()

    def write(self, data: bytes | memoryview) -> None:
        self.file.write(data)
        self.sha256.update(data)
        self.size += len(data)

    def readinto(self, buffer: memoryview) -> int:
        """Fill the buffer. Return how many bytes the file still had."""
        count = self.file.readinto(buffer)  # type: ignore[attr-defined]
        self.sha256.update(buffer[:count])
        self.size += count
        return count

    @property
    def fingerprint(self) -> Fingerprint:
        """The fingerprint of everything read or written so far."""
        return Fingerprint(self.size, self.sha256.hexdigest())


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Name the path in every OSError of the block."""
    try:
        yield
    except OSError as error:
        if error.errno is None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error


def exists(path: Path) -> bool:
    """Return whether there is anything of this name, even a broken link. Raise if that cannot be found out."""
    try:
        os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def is_real_folder(path: Path) -> bool:
    """Return whether this is a folder, and not a link to one. Raise if that cannot be found out."""
    return exists(path) and stat.S_ISDIR(os.lstat(path).st_mode)


def is_real_file(path: Path) -> bool:
    """Return whether this is a regular file, and not a link to one. Raise if that cannot be found out."""
    return exists(path) and stat.S_ISREG(os.lstat(path).st_mode)


def refuse_link(path: Path) -> None:
    """Raise an error if this is a symbolic link."""
    if path.is_symlink():
        raise ValueError(f"{path} is a symbolic link; replace it by a file or folder of its own, because training writes to it")


def list_names(folder: Path) -> list[str]:
    """Return the sorted names in a folder; none if it is missing. Raise if it cannot be read."""
    try:
        return sorted(os.listdir(folder))
    except FileNotFoundError:
        return []


@contextmanager
def open_regular(path: Path) -> Iterator[BinaryIO]:
    """Open a regular file for reading. Refuse anything else: a FIFO would block, a device might never end."""
    with naming(path):
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(handle, "rb") if is_regular(handle) else refuse(handle) as file:
            yield file


def is_regular(handle: int) -> bool:
    return stat.S_ISREG(os.fstat(handle).st_mode)


def refuse(handle: int) -> BinaryIO:
    os.close(handle)
    raise OSError(errno.EINVAL, "Not a regular file")


def read_bytes(path: Path) -> bytes:
    """Return the contents of a regular file."""
    with open_regular(path) as file:
        return file.read()


def fingerprint(path: Path) -> Fingerprint:
    """Return the fingerprint of a regular file."""
    buffer = memoryview(bytearray(BLOCK))
    with open_regular(path) as file:
        hashed = HashedFile(file)
        while hashed.readinto(buffer):
            pass
    return hashed.fingerprint


def create(path: Path) -> BinaryIO:
    """Create a file for writing. Raise if anything of this name exists, even a broken link."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    return os.fdopen(os.open(path, flags, 0o666), "wb")


def free_name(path: Path) -> Path:
    """Return the path, or if it is taken the first of `path-1`, `path-2`, … that is free."""
    found, number = path, 0
    while exists(found):
        number += 1
        found = path.with_name(f"{path.name}-{number}")
    return found


def set_aside(path: Path) -> Path:
    """Rename a damaged file or folder to `NAME.damaged`, or a free name like it. Return the new path."""
    aside = free_name(path.with_name(f"{path.name}.damaged"))
    os.rename(path, aside)
    sync(path.parent)
    return aside


def sync(path: Path) -> None:
    """Block until a file or folder is on disk."""
    with naming(path):
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def require_folder(path: Path) -> None:
    """Raise if there is no folder to write this file into."""
    if not path.parent.is_dir():
        raise FileNotFoundError(f"there is no folder {path.parent} to write {path.name} into")


@contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """Yield the path of a new, empty file to write to; rename it to `path` on success, delete it on failure."""
    require_folder(path)
    partial = free_name(path.with_name(f".{path.name}.{os.getpid()}.partial"))
    try:
        create(partial).close()
        yield partial
        sync(partial)
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    sync(path.parent)


@contextmanager
def atomic_file(path: Path) -> Iterator[HashedFile]:
    """Yield a file to write to that gets its name on success. Its fingerprint is known afterwards."""
    with atomic_write(path) as partial, naming(path), partial.open("wb") as file:
        yield HashedFile(file)


def load_json(data: str | bytes) -> Any:
    """Parse JSON from a file. Integers of more than 64 bits become floats, so that no arithmetic overflows."""
    return json.loads(data, parse_int=lambda digits: int(digits) if len(digits) < 20 else float(digits))
