"""The tuner's memory."""

from pathlib import Path

import pytest

from optg.deploy.engine import build, tune


def test_a_damaged_memory_is_ignored(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    library = build.library()
    monkeypatch.setattr(tune, "cache", lambda: tmp_path)
    for content in ("[]", "null", "3", "{"):
        (tmp_path / f"tiles-{library.key.removeprefix('engine-')}.json").write_text(content)
        assert tune.Tuner(library).known == {}
