"""Start short runs through the command line, for the tests of whole runs."""

import os
import subprocess
import sys
from pathlib import Path

from safetensors.torch import load_file

ROOT = Path(__file__).parent.parent.parent
PATHS = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1", "PYTHONPATH": os.pathsep.join(PATHS)}
ENVIRONMENT["OPTG_TRUST"] = "*"  # as --trust: the runs use the tests' own model
USER_CODE = ["--model", "tests.training.user_code:model", "--data", "tests.training.user_code:data"]
SMALL = [*USER_CODE, "--epochs", "6", "--batch-size", "16", "--sparsity", "0.9", "--device", "cpu", "--minutes", "0.001"]
SLOW = ["--model", "tests.training.user_code:slow"]


def optg(*args: str, folder: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run a command in a process of its own and wait for it."""
    output = ["--output", str(folder)] if folder else []
    command = [sys.executable, "-m", "optg", *args, *output]
    return subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, cwd=ROOT)


def start(folder: Path, *args: str) -> subprocess.Popen[str]:
    """Start training in a process of its own."""
    command = [sys.executable, "-m", "optg", "train", *SMALL, *args, "--output", str(folder)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT, cwd=ROOT)


def newest_step(folder: Path) -> int:
    """Return the step of the newest checkpoint."""
    return max((int(path.name[5:]) for path in (folder / "checkpoints").glob("step-*")), default=0)


def masks(folder: Path) -> dict[str, object]:
    """Return the masks of a finished run."""
    return {name: (t != 0).tolist() for name, t in load_file(folder / "model.safetensors").items() if name.endswith("weight")}


def read_lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []
