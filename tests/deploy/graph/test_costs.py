"""Work and temporary memory of operations, against counts by hand."""

from typing import Any

import pytest
import torch

from optg.deploy.graph.costs import PER_ELEMENT, bytes_of, cost_of
from optg.deploy.graph.domains import check_arguments
from optg.deploy.graph.operations import resolve


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def costs(op: str, *args: Any) -> tuple[int, int]:
    """Return the work beyond that of reading and writing the elements, and the temporary elements."""
    given, result = check_arguments(op, args, {}), resolve(op)(*args)
    elements = sum(t.numel() for t in (*args, result) if isinstance(t, torch.Tensor))
    work, temporary = cost_of(op, given, result)
    return work - PER_ELEMENT * elements, temporary // result.dtype.itemsize


@pytest.mark.parametrize(
    ("op", "args", "work", "temporary"),
    [
        ("aten.relu.default", (meta(2, 3),), 0, 0),
        ("aten.linear.default", (meta(5, 7, 8), meta(3, 8)), 5 * 7 * 3 * 8, 5 * 7 * 8 + 3 * 8),
        ("aten.matmul.default", (meta(6, 2, 3), meta(3, 4)), 6 * 2 * 3 * 4, 6 * 2 * 3 + 3 * 4),
        ("aten.matmul.default", (meta(6, 1, 2, 3), meta(5, 3, 4)), 30 * 2 * 3 * 4, 30 * 3 * (2 + 4)),
        ("aten.conv2d.default", (meta(2, 4, 8, 8), meta(6, 4, 3, 3)), 2 * 6 * 36 * 36 + 16 * 512 + 64_000, 2 * 36 * 36 + 512),
        (
            "aten.conv2d.default",
            (meta(1, 4, 8, 8), meta(4, 1, 1, 1), None, [1, 1], [1, 1], [1, 1], 4),
            4 * 100 + 16 * 4 * 100 + 100_000,
            4 * 100 + 4 * 100,
        ),
        ("aten.conv_transpose2d.input", (meta(1, 4, 8, 8), meta(4, 6, 2, 2)), 6144 + 16 * 6 * 81 + 81_000, 64 * 24 + 6 * 81),
        ("aten.max_pool2d.default", (meta(1, 2, 8, 8), [2, 4]), 16 * 8 * 2 * 4 * 2 + 64_000, 0),
        ("aten.einsum.default", ("ij,jk->ik", [meta(2, 3), meta(3, 4)]), 2 * 3 * 4 + 16 * (6 + 12), 2 * 3 + 3 * 4 + 2 * 4),
        (
            "aten.scaled_dot_product_attention.default",
            (meta(1, 2, 5, 8), meta(1, 2, 7, 8), meta(1, 2, 7, 8)),
            2 * 5 * 7 * 16,
            3 * 2 * 5 * 7,
        ),
        ("aten.linear.default", (meta(1, 8, dtype=torch.bfloat16), meta(3, 8, dtype=torch.bfloat16)), 8 * 24, 8 + 24),
    ],
)  # fmt: skip
def test_cost(op: str, args: tuple[Any, ...], work: int, temporary: int) -> None:
    assert costs(op, *args) == (work, temporary)


def test_bytes_of_all_results() -> None:
    assert bytes_of([meta(2, 3), (meta(4, dtype=torch.int64), 5)]) == 24 + 32
