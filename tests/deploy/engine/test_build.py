"""Compiling and caching the C code."""

import shutil
from pathlib import Path

import pytest

from optg.deploy.engine import build


@pytest.mark.parametrize("content", [b"", b"\x7fELF and no more"])
def test_a_damaged_engine_is_compiled_again(content: bytes, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(build, "cache", lambda: tmp_path)
    build._library.cache_clear()
    try:
        build.library("scalar")
        [path] = tmp_path.glob("engine-*.so")
        path.unlink()
        path.write_bytes(content)
        build._library.cache_clear()
        assert build.library("scalar").lanes == 1
    finally:
        build._library.cache_clear()


def test_a_compiler_that_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    compiler = tmp_path / "cc"
    compiler.write_text("#!/bin/sh\n[ \"$1\" = --version ] && exit 0\necho 'no such thing' >&2\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CC", str(compiler))
    build._library.cache_clear()
    try:
        with pytest.raises(build.NoCompiler, match="does not compile the engine: no such thing"):
            build.library()
    finally:
        build._library.cache_clear()


def test_the_key_changes_with_every_c_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    shutil.copytree(build.C_FILES, tmp_path / "c")
    monkeypatch.setattr(build, "C_FILES", tmp_path / "c")
    command = [shutil.which("cc") or "cc"]
    keys = [build.key(command, ())]
    for path in sorted((tmp_path / "c").rglob("*.[ch]")):
        path.write_text(path.read_text() + "/* changed */\n")
        keys.append(build.key(command, ()))
    (tmp_path / "other.c").write_text("")
    keys.append(build.key(command, [tmp_path / "other.c"]))
    assert len(keys) == len(set(keys)) > 8
