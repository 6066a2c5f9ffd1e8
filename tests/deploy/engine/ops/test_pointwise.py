"""Activations, sums and products against torch."""

from typing import Any

import pytest
import torch

from optg.deploy.graph import Node, Ref, run_graph
from tests.deploy.engine.harness import ISAS, check_ops, check_two_inputs, compile_graph, one_op

ACTIVATIONS: list[tuple[str, tuple[Any, ...]]] = [
    ("relu", ()), ("relu6", ()), ("hardswish", ()), ("hardsigmoid", ()), ("sigmoid", ()), ("silu", ()), ("tanh", ()),
    ("leaky_relu", (0.2,)), ("hardtanh", (-0.5, 0.25)), ("clamp", (None, 0.3)), ("clamp_min", (0.1,)),
]  # fmt: skip


@pytest.mark.parametrize("isa", ISAS)
def test_activations(isa: str, poisoned: None) -> None:
    check_ops(ACTIVATIONS, isa)


@pytest.mark.parametrize("isa", ISAS)
def test_sums_and_products(isa: str, poisoned: None) -> None:
    nodes = [
        Node("n", "aten.add.Tensor", (Ref("x"), Ref("y")), {"alpha": 0.5}),
        Node("n", "aten.add.Tensor", (Ref("x"), Ref("x"))),
        Node("n", "aten.mul.Tensor", (Ref("x"), Ref("y"))),
    ]
    check_two_inputs(nodes, isa)


@pytest.mark.parametrize(
    ("op", "arguments"),
    [("clamp_min", (float("nan"),)), ("clamp", (None, float("nan"))), ("hardtanh", (-1.0, float("nan")))],
)
def test_bound_that_is_nan_gives_what_torch_gives(op: str, arguments: tuple[Any, ...]) -> None:
    graph, x = one_op(op, arguments, (3, 4, 4)), torch.randn(2, 3, 4, 4)
    torch.testing.assert_close(compile_graph(graph)(x), run_graph(graph, x), equal_nan=True)
