"""Fixtures for the tests of passes."""

import pytest
import torch

from optg.core import passes


@pytest.fixture
def fused_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use the fused passes on the device of these tests, even if it is the CPU."""
    from tests.core.passes.fused_device import DEVICE

    torch.manual_seed(0)
    monkeypatch.setitem(passes.BACKENDS, DEVICE, "optg.core.passes.fused")
