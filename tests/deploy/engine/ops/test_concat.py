"""Concatenation against torch."""

import pytest
import torch

from optg.deploy.graph import Node, Ref, run_graph
from tests.deploy.engine.harness import ISAS, check_two_inputs, compile_graph, make_graph


@pytest.mark.parametrize("isa", ISAS)
def test_concatenation(isa: str, poisoned: None) -> None:
    check_two_inputs([Node("n", "aten.cat.default", ([Ref("x"), Ref("y"), Ref("x")], 1))], isa)


def test_concatenation_of_the_parts_of_a_tensor_runs_in_torch() -> None:
    nodes = [Node("u", "aten.unbind.int", (Ref("x"), 2)), Node("n", "aten.cat.default", (Ref("u"), 1))]
    graph, x = make_graph(nodes, Ref("n"), {}, (3, 4, 5)), torch.randn(2, 3, 4, 5)
    assert torch.equal(compile_graph(graph)(x), run_graph(graph, x))
