from pathlib import Path

import pytest

from tests.training.runs import SMALL, optg


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory) -> Path:
    """A run that was never interrupted."""
    folder = tmp_path_factory.mktemp("runs") / "undisturbed"
    done = optg("train", *SMALL, folder=folder)
    assert done.returncode == 0, done.stderr
    return folder
