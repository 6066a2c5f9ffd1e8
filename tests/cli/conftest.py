from pathlib import Path

import pytest

from tests.training.runs import SMALL, optg


@pytest.fixture(scope="session")
def finished_run(tmp_path_factory) -> Path:
    """The folder of a short run of the user's own model and data."""
    folder = tmp_path_factory.mktemp("runs") / "finished"
    done = optg("train", *SMALL, folder=folder)
    assert done.returncode == 0, done.stderr
    return folder
