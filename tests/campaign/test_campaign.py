"""A short selection of each part of the campaign. `make campaign` runs them in full."""

import json
import subprocess
import sys

import pytest

from tests.campaign.server import ROOT
from tests.training.runs import ENVIRONMENT

SELECTIONS = {"faults": (12, 181), "kills": (3, 1), "ranks": (1, 1), "flips": (6, 199), "soak": (1, 1)}  # cases, every Nth


@pytest.mark.parametrize("part", SELECTIONS)
def test_a_selection_of_cases_finds_no_failure(part):
    count, every = SELECTIONS[part]
    command = [sys.executable, "-m", f"tests.campaign.{part}", "--count", str(count), "--every", str(every)]
    done = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["failures"] == [] and result["counts"]["cases"] == count
