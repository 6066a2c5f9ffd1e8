"""Int8 pooling against the integer reference."""

from typing import Any

import pytest
import torch

from tests.deploy.engine.int8.graphs import INT8_ISAS, Builder, check, check_against_torch

MAXIMA = [
    ([2, 2],), ([3, 3], [2, 2], [1, 1]), ([3, 2], [1, 1]), ([2, 2], [3, 3]), ([3, 3], [2, 2], [1, 1], [2, 1]),
    ([3, 3], [2, 2], [0, 0], [1, 1], True),
]  # fmt: skip
MEANS = [
    ("avg_pool2d", ([2, 2],)), ("avg_pool2d", ([3, 3], [2, 2], [1, 1])), ("avg_pool2d", ([3, 3], [2, 2], [1, 1], True, False)),
    ("avg_pool2d", ([3, 3], [2, 2], [1, 1], False, True, 5)), ("adaptive_avg_pool2d", ([1, 1],)), ("mean.dim", ([2, 3], True)),
]  # fmt: skip


@pytest.mark.parametrize("isa", INT8_ISAS)
@pytest.mark.parametrize("arguments", MAXIMA)
def test_max_pool(arguments: tuple[Any, ...], isa: str, poisoned_bytes: None) -> None:
    for batch, size in ((1, (9, 9)), (3, (7, 12)), (2, (8, 70)), (1, (6, 5))):
        b = Builder((3, *size))
        y = b.quantize(b.aten("max_pool2d", b.input(scale=0.02), *arguments), 0.02, b.nodes[0].args[2])
        b.quantize(b.aten("conv2d", y, b.weight(4, 3, 3, 3), None, [1, 1], [1, 1]), 0.05, 3)  # reads the padding
        check(b.graph(), torch.randn(batch, 3, *size), threads=2, isa=isa)


@pytest.mark.parametrize("isa", INT8_ISAS)
@pytest.mark.parametrize("op, arguments", MEANS)
def test_mean(op: str, arguments: tuple[Any, ...], isa: str, poisoned_bytes: None) -> None:
    for batch, size in ((1, (9, 9)), (3, (7, 12)), (2, (8, 70)), (9, (2, 2))):
        b = Builder((5, *size))
        b.quantize(b.aten(op, b.input(), *arguments), 0.01, 101)
        if min(size) > 2 or op != "avg_pool2d":
            check(b.graph(), torch.randn(batch, 5, *size), threads=2, isa=isa)
            check_against_torch(b.graph(), torch.randn(batch, 5, *size))
