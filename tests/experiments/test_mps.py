"""Starting and stopping NVIDIA's MPS, with a script in place of its control program."""

import os
from pathlib import Path

import pytest

from optg.experiments.mps import multi_process_service


def test_mps_is_started_before_the_runs_and_stopped_after_them(tmp_path, monkeypatch):
    control = tmp_path / "nvidia-cuda-mps-control"
    calls = tmp_path / "calls"
    control.write_text(
        f'#!/bin/sh\nif [ "$1" = -d ]; then echo "start $CUDA_MPS_PIPE_DIRECTORY" >> {calls}; touch {tmp_path}/up; exit 0; fi\n'
        f'read line; echo "$line" >> {calls}; test -e {tmp_path}/up\n'
    )
    control.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with multi_process_service(True):
        folder = os.environ["CUDA_MPS_PIPE_DIRECTORY"]
        assert os.environ["CUDA_MPS_LOG_DIRECTORY"] == folder and Path(folder).is_dir()
        with multi_process_service(True):  # already running: not started again
            pass
    assert calls.read_text().splitlines() == ["get_server_list", f"start {folder}", "get_server_list", "quit"]
    assert "CUDA_MPS_PIPE_DIRECTORY" not in os.environ


def test_missing_mps_is_refused(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ValueError, match="--mps needs nvidia-cuda-mps-control"), multi_process_service(True):
        pass
