"""Measure how fast a model runs on this CPU: optg against torch, torch.compile, onnxruntime and OpenVINO.

Each number of threads is measured in its own process, because some engines fix theirs once. Within a process all engines are
prepared before the first is timed, and they take short turns, so that any other load on the machine affects all of them alike.
"""

from optg.deploy.bench.command import run_benchmark
from optg.deploy.bench.subject import Subject, prune_at_random, settle_norms

__all__ = ["Subject", "prune_at_random", "run_benchmark", "settle_norms"]
