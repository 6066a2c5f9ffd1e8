"""Run commands in a child process that dies, or meets an error, at a chosen file-system call."""

import errno
import mmap
import os
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

from optg import cli
from optg.cli import errors

KILLED = 137
READS, WRITES = {"os.listdir", "os.scandir"}, {"os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.link", "os.truncate"}
TO_WRITE = os.O_WRONLY | os.O_RDWR | os.O_CREAT


class Fault:
    """At file-system call number `at` inside `folder`, counted from 0: die, or raise `error`. Later calls succeed.

    To die before a call that only reads is the same as to die before the next one, so such calls count for errors only.
    """

    def __init__(self, folder: Path, at: int, error: OSError | None = None) -> None:
        self.folder, self.at, self.error, self.calls = str(folder), at, error, 0
        self.happened = mmap.mmap(-1, 1)  # shared with the child: not 0 once the fault has happened

    def install(self) -> None:
        """Watch the calls of this process. An audit hook cannot be removed, so call this in a child only."""
        sync = os.fsync

        def fsync(handle: int) -> None:
            self.count(os.readlink(f"/proc/self/fd/{handle}"))
            sync(handle)

        os.fsync = fsync
        sys.addaudithook(self.hook)
        errors.TRUSTED = (*errors.TRUSTED, __file__)  # else an error from here counts as one of the user's own code

    def hook(self, event: str, args: tuple[Any, ...]) -> None:
        writes = event in WRITES or (event == "open" and args[2] & TO_WRITE)
        if writes or (self.error and (event in READS or event == "open")):
            self.count(*(os.fspath(arg) for arg in args if isinstance(arg, (str, os.PathLike))))

    def count(self, *paths: str) -> None:
        if any(path.startswith(self.folder) for path in paths):
            self.calls += 1
            if self.calls == self.at + 1:
                self.happened[0] = 1
                if self.error is None:
                    os._exit(KILLED)
                raise self.error


def run(*args: object, fault: Fault | None = None) -> tuple[int, str]:
    """Run an `optg` command in a forked child. Return its exit status and what it printed."""
    with tempfile.TemporaryFile("w+") as output:
        child = os.fork()
        if not child:
            os._exit(call([str(arg) for arg in args], output.fileno(), fault))
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        output.seek(0)
        return status, output.read()


def call(args: list[str], output: int, fault: Fault | None) -> int:
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.stdout, sys.stderr = os.fdopen(1, "w", buffering=1), os.fdopen(2, "w", buffering=1)
    sys.argv = ["optg", *args]
    try:
        if fault:
            fault.install()
        cli.main()
        return 0
    except SystemExit as leaving:
        return leaving.code if isinstance(leaving.code, int) else 1
    except BaseException:
        traceback.print_exc()
        return 1


class FailingReads(Fault):
    """Raise EIO whenever one of these paths is opened or listed."""

    def __init__(self, paths: list[str]) -> None:
        self.paths = paths

    def hook(self, event: str, args: tuple[Any, ...]) -> None:
        if event in (*READS, "open") and args[0] in self.paths:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    def count(self, *paths: str) -> None:
        pass
