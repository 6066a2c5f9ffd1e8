"""Compiling and caching the C code."""

import os
import platform
import shutil
import subprocess
import warnings
from collections.abc import Callable, Iterator
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


@pytest.mark.parametrize(
    "machine, system, flags, expected",
    [
        ("x86_64", "Linux", "flags : avx2 avx512f", "native"),
        ("aarch64", "Linux", "Features : fp asimd asimdhp", "neon"),
        ("aarch64", "Linux", "Features : fp asimd asimddp", "neon_dotprod"),
        ("aarch64", "Linux", "Features : fp asimd asimddp i8mm", "neon_i8mm"),
        ("arm64", "Darwin", "arm", "neon_dotprod"),
    ],
)
def test_native_means_a_named_instruction_set_on_arm(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, machine: str, system: str, flags: str, expected: str
) -> None:
    """A compiler that only writes its arguments down stands for one on ARM."""
    compiler = tmp_path / "cc"
    compiler.write_text(f'#!/bin/sh\n[ "$1" = --version ] && exit 0\necho "$@" > {tmp_path}/arguments\nexit 1\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CC", str(compiler))
    monkeypatch.setattr(platform, "machine", lambda: machine)
    monkeypatch.setattr(platform, "system", lambda: system)
    monkeypatch.setattr(build, "cpu_flags", lambda: flags)
    build._library.cache_clear()
    with pytest.raises(build.NoCompiler):
        build.library("native")
    assert " ".join(build.ISAS[expected]) in (tmp_path / "arguments").read_text()


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A path for the cache, which does not exist yet."""
    monkeypatch.setenv("OPTG_CACHE", str(tmp_path / "new" / "cache"))
    build.cache.cache_clear()
    build._library.cache_clear()
    yield tmp_path / "new" / "cache"
    build.cache.cache_clear()
    build._library.cache_clear()


def test_the_cache_and_its_new_parents_are_private(own_cache: Path) -> None:
    before = os.umask(0)
    try:
        assert build.cache() == own_cache
        assert build.library("scalar").lanes == 1
    finally:
        os.umask(before)
    [engine] = own_cache.glob("engine-*.so")
    assert [path.stat().st_mode & 0o777 for path in (own_cache.parent, own_cache, engine)] == [0o700, 0o700, 0o700]


def exposed(path: Path) -> None:
    path.mkdir(parents=True)
    path.chmod(0o777)


def in_exposed_folder(path: Path) -> None:
    path.mkdir(parents=True)
    path.parent.chmod(0o777)


def owned_by_another(path: Path) -> None:
    path.mkdir(parents=True)
    if os.geteuid():
        pytest.skip("only root can make files of another user")
    os.chown(path, 12345, 12345)


def a_file(path: Path) -> None:
    path.parent.mkdir()
    path.write_text("")


@pytest.mark.parametrize(
    ("prepare", "reason"),
    [
        (exposed, "it must belong to you, and nobody else may write to it"),
        (in_exposed_folder, "other users can replace it, because they can write to .*new"),
        (owned_by_another, "it must belong to you"),
        (a_file, "File exists|must belong to you"),
    ],
)
def test_a_cache_that_others_can_write_to_is_not_used(own_cache: Path, prepare: Callable[[Path], None], reason: str) -> None:
    prepare(own_cache)
    with pytest.warns(UserWarning, match=f"^the cache .* is not used: .*({reason})"):
        private = build.cache()
    assert private != own_cache and private.stat().st_mode & 0o777 == 0o700 and private.stat().st_uid == os.geteuid()


PLANTED = '#include <stdio.h>\n__attribute__((constructor)) static void f(void) { fclose(fopen("%s", "w")); }\n'


OTHER_WAYS = [pytest.param(how, marks=pytest.mark.long) for how in ("the file is a link", "the folder is another user's")]


@pytest.mark.parametrize("how", ["others can write to the file", *OTHER_WAYS])
def test_a_planted_engine_is_not_loaded(own_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    trace = tmp_path / "executed"
    build.library("scalar")
    own_cache = own_cache.rename(tmp_path / "moved")  # a library at the path of a loaded one would not be loaded again
    monkeypatch.setenv("OPTG_CACHE", str(own_cache))
    [engine] = own_cache.glob("engine-*.so")
    planted = tmp_path / "planted.so"
    compile_command = [shutil.which("cc") or "cc", "-shared", "-fPIC", "-x", "c", "-", "-o", str(planted)]
    subprocess.run(compile_command, input=PLANTED % trace, text=True, check=True)
    engine.unlink()
    if how == "the file is a link":
        engine.symlink_to(planted)
    else:
        shutil.copy(planted, engine)
        engine.chmod(0o777 if how == "others can write to the file" else 0o700)
    if how == "the folder is another user's":
        if os.geteuid():
            pytest.skip("only root can make files of another user")
        os.chown(own_cache, 12345, 12345)
    build.cache.cache_clear()
    build._library.cache_clear()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert build.library("scalar").lanes == 1
    assert not trace.exists()
