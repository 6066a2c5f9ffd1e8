"""Poolings against torch."""

import pytest

from tests.deploy.engine.harness import ISAS, check_ops

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
