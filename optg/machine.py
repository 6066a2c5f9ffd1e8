"""Describe the machine and the source that produced a result."""

import os
import platform
import subprocess
from pathlib import Path


def cores() -> int:
    """Return the number of CPU cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cpu_name() -> str:
    """Return the processor's model name."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def revision() -> str | None:
    """Return the git revision of this source tree, or None if it is not a checkout of its own."""
    root = Path(__file__).resolve().parents[1]
    try:
        command = ["git", "-C", str(root), "rev-parse", "--show-toplevel", "HEAD"]
        top, found = subprocess.run(command, capture_output=True, text=True).stdout.splitlines()
    except (OSError, ValueError):  # git is missing, or this is not a checkout
        return None
    return found if Path(top) == root else None
