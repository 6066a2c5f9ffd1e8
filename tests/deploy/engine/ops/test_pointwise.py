"""Activations, sums and products against torch."""

from typing import Any

import pytest

from optg.deploy.graph import Node, Ref
from tests.deploy.engine.harness import ISAS, check_ops, check_two_inputs

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
