"""The campaign's parts on packed files and the engine, in short."""

import ctypes
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from optg.deploy.graph import Node, Ref, run_graph
from tests.campaign import many_calls, random_networks
from tests.campaign.packed_compiled import jumps
from tests.campaign.packed_mutations import PERTURB
from tests.campaign.seeds import Seeds
from tests.deploy.engine.harness import make_graph

ROOT = Path(__file__).parents[2]


def run_part(name: str, *args: str) -> dict[str, object]:
    """Run a part in a process of its own and return its result."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", f"tests.campaign.{name}", *args]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


def case_with_failures(seed: int) -> str:
    if seed == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    if seed == 5:
        raise ValueError("wrong")
    if seed == 7:
        os._exit(0)
    return "even" if seed % 2 == 0 else "odd"


def test_crashes_and_errors_are_counted_and_the_others_go_on() -> None:
    seeds = Seeds(case_with_failures, count=10, seed=0, seconds=60)
    seeds.run()
    assert seeds.failures == ["seed 3: status -9", "seed 5: ValueError: wrong", "seed 7: status 0"]
    assert seeds.counts == {"cases": 10, "even": 5, "odd": 2} and seeds.next == 10


def test_range_of_seeds_can_be_continued() -> None:
    first, second = Seeds(str, count=5, seed=0, seconds=60), Seeds(str, count=5, seed=5, seconds=60)
    first.run()
    second.run()
    assert first.next == 5 and set(second.counts) == {"cases", "5", "6", "7", "8", "9"}


def test_filled_memory_shows_in_uninitialised_tensors() -> None:
    """The two patterns of `--plain` differ in memory that nobody writes."""
    c, found = ctypes.CDLL(None), []
    try:
        for byte in (1, 0x55):
            c.mallopt(PERTURB, byte)
            found.append(torch.empty(1000, dtype=torch.uint8).clone())
    finally:
        c.mallopt(PERTURB, 0)
    assert not torch.equal(*found)


def test_forged_files_are_refused_or_run() -> None:
    found = run_part("packed_mutations", "--plain", "--count", "300")
    assert not found["failures"]
    assert min(found["counts"][outcome] for outcome in ("refused", "runs")) > 50


def test_forged_files_compile_under_sanitizers_and_agree_with_torch() -> None:
    found = run_part("packed_compiled", "--count", "150")
    assert not found["failures"]
    assert found["counts"]["compiled"] > 10 and found["slowest_seconds"] < 20 and found["most_megabytes"] < 1000


def test_differences_count_unless_rounding_errors_explain_them() -> None:
    nodes = [Node("t", "aten.tanh.default", (Ref("x"),)), Node("c", "aten.ceil.default", (Ref("t"),))]
    smooth, steep = make_graph(nodes[:1], Ref("t"), {}, (3,)), make_graph(nodes, Ref("c"), {}, (3,))
    large, small = torch.full((2, 3), 100.0), torch.full((2, 3), 0.5)  # tanh(100) rounds to 1, and ceil makes it 1 or 2
    for graph, x, expected in ((smooth, large, False), (steep, small, False), (steep, large, True)):
        assert jumps(graph, [x], [run_graph(graph, x)], 0.5) == expected


def test_random_int8_files_equal_the_reference_under_sanitizers() -> None:
    found = run_part("packed_int8", "--count", "80")
    assert not found["failures"] and found["counts"]["runs on bytes"] > 50


def test_random_networks_agree_with_torch() -> None:
    found = run_part("random_networks", "--count", str(3 * len(random_networks.ISAS)))
    assert not found["failures"] and found["counts"][random_networks.ISAS[0]] == 3


def test_memory_is_flat_over_many_calls() -> None:
    found = many_calls.call_many_times(8000, 0, 60)
    assert found["failures"] == [] and found["counts"] == {"cases": 8000}


@pytest.mark.long
def test_forged_files_under_sanitizers() -> None:
    found = run_part("packed_mutations", "--count", "20000")
    assert not found["failures"]
