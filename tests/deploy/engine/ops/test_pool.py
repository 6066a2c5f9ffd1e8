"""Poolings against torch."""

import pytest
import torch

from optg.deploy.engine.plan import Segment
from optg.deploy.graph import run_graph
from tests.deploy.engine.harness import ISAS, check_ops, compile_graph, one_op

POOLINGS = [
    ("max_pool2d", ([3, 3], [2, 2], [1, 1])),
    ("max_pool2d", ([2, 2], [2, 2])),
    ("max_pool2d", ([3, 2], [2, 3], [1, 0], [2, 1], True)),
    ("avg_pool2d", ([3, 3], [2, 2], [1, 1])),
    ("avg_pool2d", ([2, 2],)),
    ("avg_pool2d", ([3, 3], [2, 2], [1, 1], True, False)),
    ("avg_pool2d", ([3, 3], [2, 2], [1, 1], True, True)),
    ("avg_pool2d", ([2, 3], [1, 2], [0, 1], False, True, 5)),
    ("adaptive_avg_pool2d", ([1, 1],)),
    ("adaptive_avg_pool2d", ([3, 4],)),
]


@pytest.mark.parametrize("isa", ISAS)
def test_poolings(isa: str, poisoned: None) -> None:
    check_ops(POOLINGS, isa)


def test_maximum_whose_indices_are_returned_runs_in_torch() -> None:
    graph, x = one_op("max_pool2d_with_indices", ([2, 2],), (3, 4, 4)), torch.randn(2, 3, 4, 4)
    found, expected = compile_graph(graph)(x), run_graph(graph, x)
    assert len(found) == 2 and all(map(torch.equal, found, expected))


@pytest.mark.parametrize(
    ("op", "arguments"),
    [
        ("max_pool2d", ([3, 3], [4096, 4096])),
        ("avg_pool2d", ([2, 2], [4096, 4096], [0, 0], True)),
        ("max_pool2d", ([4096, 4096], [4096, 4096], [5, 5], [1, 1], True)),
    ],
)
def test_steps_and_windows_beyond_the_image_need_little_memory(op: str, arguments: tuple[object, ...]) -> None:
    """Planning the first two took 1 GB, and the third did not end."""
    graph, x = one_op(op, arguments, (3, 5, 7)), torch.randn(2, 3, 5, 7)
    compiled = compile_graph(graph)
    torch.testing.assert_close(compiled(x), run_graph(graph, x))
    programs = [program for part in compiled.network.parts if isinstance(part, Segment) for program in part.programs.values()]
    assert all(program.size < 2**20 for program in programs)
