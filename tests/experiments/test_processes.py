"""Environment variables of the processes of a run."""

import os

from optg.experiments.processes import process_environment


def test_gpus_are_used_in_turn_and_cores_are_shared(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert [process_environment(slot, 4, "cuda")["CUDA_VISIBLE_DEVICES"] for slot in range(4)] == ["3", "5", "3", "5"]
    assert int(process_environment(0, 4, "cuda")["OMP_NUM_THREADS"]) == max(1, len(os.sched_getaffinity(0)) // 4)
