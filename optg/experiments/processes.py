"""Train a run: in a process of its own, with its GPU and its share of the CPU cores, or in this process."""

import contextlib
import os
import shlex
import subprocess
import sys
import traceback
from pathlib import Path

from optg.machine import cores


def train_here(arguments: list[str], log_path: Path) -> int:
    """Run `optg` with these arguments in this process and append its output to a log. Return the exit status."""
    from optg.deploy import qat
    from optg.training.arguments import parse_train_args
    from optg.training.run import run_training

    log_path.parent.mkdir(parents=True, exist_ok=True)
    before, sys.argv = sys.argv, ["optg", *arguments]
    with log_path.open("a") as log, contextlib.redirect_stdout(log), contextlib.redirect_stderr(log):
        try:
            run_training(*parse_train_args(arguments[1:]), qat)
            return 0
        except SystemExit as leaving:
            return leaving.code if isinstance(leaving.code, int) else 1
        except Exception:
            traceback.print_exc()
            return 1
        finally:
            sys.argv = before


def start_process(command: list[str], log_path: Path, environment: dict[str, str]) -> subprocess.Popen[bytes]:
    """Start a command and append its output to a log."""
    log_path.parent.mkdir(parents=True, exist_ok=True)
    with log_path.open("ab") as log:
        log.write(f"$ {shlex.join(command)}\n".encode())
        log.flush()
        # A session of its own: Ctrl-C in the terminal then reaches only this process, which forwards it once.
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )


def process_environment(slot: int, jobs: int, device: str) -> dict[str, str]:
    """Return the environment of the process in a slot: GPUs are used in turn, CPU cores are divided among the jobs."""
    threads = max(1, cores() // max(1, jobs))
    environment = {"OMP_NUM_THREADS": str(threads), **os.environ, "PYTHONUNBUFFERED": "1"}
    gpus = visible_gpus() if device in ("auto", "cuda") else []
    if len(gpus) > 1:
        environment["CUDA_VISIBLE_DEVICES"] = gpus[slot % len(gpus)]
    return environment


def visible_gpus() -> list[str]:
    """Return the GPUs as CUDA_VISIBLE_DEVICES names them."""
    if given := os.environ.get("CUDA_VISIBLE_DEVICES"):
        return given.split(",")
    import torch

    return [str(i) for i in range(torch.cuda.device_count())]


def last_line(log_path: Path) -> str:
    lines = log_path.read_text(errors="replace").strip().splitlines()
    return lines[-1] if lines else "no output"
