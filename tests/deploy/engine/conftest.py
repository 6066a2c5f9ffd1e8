"""Fixtures for the tests of the engine."""

import ctypes
from typing import Any

import pytest
import torch

from optg.deploy.engine import plan
from optg.deploy.engine.runner import Runner


@pytest.fixture(autouse=True)
def share_small_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let threads share even the smallest work."""
    monkeypatch.setattr(plan, "SHARED", -1)


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
