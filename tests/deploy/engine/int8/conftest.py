"""Fixtures for the tests of the int8 operations."""

import ctypes
from typing import Any

import pytest
import torch

from optg.deploy.engine.int8 import segment
from optg.deploy.engine.runner import Runner


@pytest.fixture(autouse=True)
def share_small_int8_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let threads share even the smallest work."""
    monkeypatch.setattr(segment, "SHARED", -1)


@pytest.fixture
def poisoned_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill new memory with 0xAB, so that reading it before writing it shows."""
    workspace, empty = Runner.workspace, torch.empty

    def dirty_workspace(self: Runner, size: int, number: int) -> Any:
        pointers = workspace(self, size, number)
        for _, address in self.arenas:
            ctypes.memset(address, 0xAB, self.arena_size)
        return pointers

    monkeypatch.setattr(Runner, "workspace", dirty_workspace)
    monkeypatch.setattr(torch, "empty", lambda *shape, **k: empty(*shape, **k).fill_(171))
