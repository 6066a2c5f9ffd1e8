"""Runs over several processes: the same masks as one process, with restarts and a changing number of processes."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from optg.training.verify import verify
from tests.training.runs import ENVIRONMENT, ROOT, SMALL, masks, newest_step, optg


def torchrun(processes: int, folder: Path, parallel: str, *options: str) -> list[str]:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes), *options]
    return [*launcher, "-m", "optg", "train", *SMALL, "--parallel", parallel, "--output", str(folder)]


def train_with_two(folder: Path, parallel: str) -> Path:
    done = subprocess.run(torchrun(2, folder, parallel), capture_output=True, text=True, env=ENVIRONMENT, cwd=ROOT)
    assert done.returncode == 0, done.stderr[:5000]
    return folder


@pytest.fixture(scope="module")
def two(tmp_path_factory) -> Path:
    return train_with_two(tmp_path_factory.mktemp("two") / "ddp", "ddp")


def test_two_processes_end_with_the_masks_of_one(undisturbed, two, tmp_path):
    assert masks(two) == masks(undisturbed)
    assert masks(train_with_two(tmp_path / "fsdp", "fsdp")) == masks(undisturbed)


def test_only_the_first_of_two_processes_writes(two):
    assert {finding.state for finding in verify(two).findings} == {"whole"} and verify(two).is_fine


def test_a_worker_that_dies_is_replaced_and_the_run_resumes(two, tmp_path):
    folder = tmp_path / "elastic"
    command = torchrun(2, folder, "ddp", "--max-restarts", "1")
    log = (tmp_path / "log").open("w")
    process = subprocess.Popen(
        [*command, "--model", "tests.training.user_code:slow"], env=ENVIRONMENT, cwd=ROOT, stdout=log, stderr=log
    )
    while process.poll() is None and newest_step(folder) < 10:
        time.sleep(0.01)
    workers = subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True, text=True).stdout.split()
    os.kill(int(workers[-1]), signal.SIGKILL)
    assert process.wait() == 0, (tmp_path / "log").read_text()[-3000:]
    assert "Resuming from step-" in (tmp_path / "log").read_text()
    assert (folder / "model.safetensors").read_bytes() == (two / "model.safetensors").read_bytes()


@pytest.mark.parametrize("stops", [[(2, 15)], pytest.param([(4, 15), (2, 35)], marks=pytest.mark.long)])
def test_a_run_resumes_with_fewer_processes_and_then_one(undisturbed, tmp_path, stops):
    folder = tmp_path / "shrinking"
    for processes, until in stops:
        command = torchrun(processes, folder, "fsdp")
        log = (tmp_path / f"{processes}.log").open("w")
        process = subprocess.Popen(command, env=ENVIRONMENT, cwd=ROOT, stdout=log, stderr=log)
        while process.poll() is None and newest_step(folder) < until:
            time.sleep(0.01)
        assert process.poll() is None, (tmp_path / f"{processes}.log").read_text()[-3000:]
        process.terminate()  # torchrun forwards it: all processes finish the step, the first saves
        process.wait()
    if newest_step(folder) == 60:  # the signal came too late: resume from the previous checkpoint
        shutil.rmtree(folder / "checkpoints" / "step-000000060")
    assert until <= newest_step(folder) < 60
    assert optg("train", *SMALL, folder=folder).returncode == 0
    assert masks(folder) == masks(undisturbed)
