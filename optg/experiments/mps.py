"""NVIDIA's Multi-Process Service (MPS), which lets the kernels of several processes run on one GPU at the same time."""

import contextlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator


@contextlib.contextmanager
def multi_process_service(wanted: bool) -> Iterator[None]:
    """Start MPS and stop it at the end, unless it is already running or not wanted."""
    control = shutil.which("nvidia-cuda-mps-control")
    if not wanted:
        yield
        return
    if control is None:
        raise ValueError("--mps needs nvidia-cuda-mps-control, which is not installed here; remove --mps")

    def send(text: str) -> int:
        return subprocess.run([control], input=text.encode(), capture_output=True, timeout=30).returncode

    if send("get_server_list\n") == 0:
        yield
        return
    with tempfile.TemporaryDirectory(prefix="mps-", ignore_cleanup_errors=True) as folder:
        before = dict(os.environ)
        os.environ["CUDA_MPS_PIPE_DIRECTORY"], os.environ["CUDA_MPS_LOG_DIRECTORY"] = folder, folder
        try:
            started = subprocess.run([control, "-d"], capture_output=True, text=True, timeout=30)
            if started.returncode:
                reason = (started.stderr or started.stdout).strip().splitlines()
                raise ValueError(f"cannot start MPS ({reason[-1] if reason else started.returncode}); remove --mps")
            yield
        finally:
            send("quit\n")
            os.environ.clear()
            os.environ.update(before)
