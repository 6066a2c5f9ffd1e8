"""Fixtures for the tests of the engine."""

import ctypes
from typing import Any

import pytest
import torch

from optg.deploy import compile
from optg.deploy.engine import plan
from optg.deploy.engine.runner import Runner
from tests.deploy.engine import replay


@pytest.fixture(autouse=True)
def share_small_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let threads share even the smallest work."""
    monkeypatch.setattr(plan, "SHARED", -1)


@pytest.fixture(autouse=True)
def replay_on_other_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `isa` also be the name of a target in replay.py."""
    library, launch = compile.library, Runner.launch

    def choose_library(isa: str | None = None, sources: Any = ()) -> Any:
        return replay.engine(isa, tuple(sources)) if isa in replay.TARGETS else library(isa, sources)

    def launch_or_replay(
        self: Runner, program: Any, addresses: Any, count: int, arenas: Any, first: int, groups: int, together: int
    ) -> None:
        if isinstance(self.library, replay.Engine):
            self.library.prepare(program, addresses, arenas, first + groups)
        launch(self, program, addresses, count, arenas, first, groups, together)

    monkeypatch.setattr(compile, "library", choose_library)
    monkeypatch.setattr(Runner, "launch", launch_or_replay)


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill new memory with NaN, so that reading it before writing it shows."""
    workspace, empty = Runner.workspace, torch.empty

    def nan_workspace(self: Runner, size: int, number: int) -> Any:
        pointers = workspace(self, size, number)
        for _, address in self.arenas:
            ctypes.memset(address, 0xFF, self.arena_size)
        return pointers

    monkeypatch.setattr(Runner, "workspace", nan_workspace)
    monkeypatch.setattr(torch, "empty", lambda *shape, **k: empty(*shape, **k).fill_(float("nan")))
