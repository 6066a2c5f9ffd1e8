"""Settings for tests of trainers. Lightning imports torchvision if it is installed."""

import logging
from collections.abc import Iterator

import pytest
from accelerate.state import AcceleratorState

from tests.torchvision_import import import_torchvision

import_torchvision()
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


@pytest.fixture(autouse=True)
def new_accelerate_state() -> Iterator[None]:
    """accelerate keeps device and precision for the whole process."""
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
