"""The engine under AddressSanitizer and UndefinedBehaviorSanitizer, with vectors of four lanes.

`make test-long` also runs the tests of int8 operations under sanitizers, for every instruction set (replay.py).
"""

import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from optg.deploy.engine import structs
from tests.deploy.engine import replay
from tests.deploy.engine.harness import one_op, random_convolution, relative_error, small_net
from tests.deploy.engine.int8.graphs import check, small_int8_net
from tests.deploy.engine.int8.test_convolution import random_convolution as random_int8_convolution
from tests.deploy.engine.ops.test_mean import MEANS
from tests.deploy.engine.ops.test_pointwise import ACTIVATIONS
from tests.deploy.engine.ops.test_pool import POOLINGS
from tests.deploy.engine.ops.test_reshape import RESHAPES
from tests.deploy.engine.ops.test_softmax import SOFTMAXES

SANITIZED = ("-DLANES=4", *replay.SANITIZED)


def exact_arena(size: int) -> tuple[Any, int]:
    """Return an arena without spare memory at its end, so that a sanitizer sees reads beyond it."""
    return structs.aligned(size)


def run_sanitized() -> None:
    """Run random convolutions, a net and single operations. The test below calls this in a process with sanitizers."""
    structs.arena = exact_arena
    rng = random.Random(6)
    torch.manual_seed(6)
    for _ in range(40):
        graph, inputs, threads, cut = random_convolution(rng)
        assert relative_error(graph, threads, "scalar", *inputs, cut=cut) < 1e-5
    for batch in (1, 9):
        assert relative_error(small_net(), 2, "scalar", torch.randn(batch, 3, 11, 11), cut=6) < 1e-5
    for op, arguments in (*POOLINGS, *ACTIVATIONS, *SOFTMAXES, *MEANS, *RESHAPES):
        assert relative_error(one_op(op, arguments, (5, 12, 12)), 2, "scalar", torch.randn(9, 5, 12, 12)) < 1e-5
    for _ in range(25):
        graph, xs, threads = random_int8_convolution(rng)
        check(graph, *xs, threads=threads, isa="scalar")
    for batch in (1, 9):
        check(small_int8_net(), torch.randn(batch, 3, 13, 11), threads=2, isa="scalar")
    print("clean")


def test_sanitizers_are_silent(tmp_path: Path) -> None:
    names = [["cc", f"-print-file-name={name}"] for name in ("libasan.so", "libubsan.so")]
    runtime = [subprocess.run(command, capture_output=True, text=True).stdout.strip() for command in names]
    if not all(map(os.path.isabs, runtime)):
        pytest.skip("the sanitizers are not installed")
    program = (
        "from optg.deploy.engine import build\n"
        f"build.ISAS['scalar'] = {SANITIZED}\n"
        "from tests.deploy.engine.test_sanitizers import run_sanitized\n"
        "run_sanitized()\n"
    )
    environment = {**os.environ, "LD_PRELOAD": " ".join(runtime), "ASAN_OPTIONS": "detect_leaks=0", "OMP_NUM_THREADS": "1"}
    environment["OPTG_CACHE"] = str(tmp_path)
    root = Path(__file__).parents[3]
    done = subprocess.run([sys.executable, "-c", program], cwd=root, env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.endswith("clean\n"), done.stderr[-3000:]
