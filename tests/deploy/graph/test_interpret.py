"""The interpreter: dry runs, and operations outside the permitted list."""

import pytest
import torch
from torch import nn

from optg.deploy.graph import Graph, GraphError, Node, Ref, capture, dry_run, run_graph, to_json
from tests.deploy.graph.comparison import assert_same_outputs
from tests.toy import convnet


def test_operation_that_is_not_permitted_in_a_file_still_runs() -> None:
    class Rare(nn.Module):
        def forward(self, x):
            return torch.special.i0(x)

    graph, x = capture(Rare(), torch.randn(2, 3)), torch.randn(2, 3)
    assert_same_outputs(run_graph(graph, x), torch.special.i0(x))
    with pytest.raises(GraphError, match="which a packed file cannot hold"):
        to_json(graph)


def test_dry_run_returns_shapes_without_allocating_memory() -> None:
    graph = capture(convnet().eval(), torch.randn(1, 1, 8, 8))
    shapes = {name: tuple(value.shape) for name, value in dry_run(graph, batch=10**9).items()}
    assert shapes["conv2d"] == (10**9, 8, 8, 8) and shapes[graph.outputs.name] == (10**9, 10)


def test_python_functions_accept_plain_numbers_only() -> None:
    def graph_of(*nodes: Node) -> Graph:
        return Graph(["x"], [(None,)], [torch.float32], list(nodes), Ref(nodes[-1].name), {}, {})

    sizes = Node("n", "aten.sym_size.int", (Ref("x"), 0)), Node("m", "operator.mul", (Ref("n"), 3))
    assert run_graph(graph_of(*sizes), torch.ones(4)) == 12
    powers = [Node("n0", "operator.add", (2**40, 0))]
    powers += [Node(f"n{i + 1}", "operator.mul", (Ref(f"n{i}"), Ref(f"n{i}"))) for i in range(30)]
    with pytest.raises(GraphError, match="out of range"):
        run_graph(graph_of(*powers), torch.ones(4))
    for node in (
        Node("n", "operator.mul", ("x", 10**9)),
        Node("n", "operator.getitem", (Ref("x"), 0)),
        Node("n", "aten.relu.default"),
    ):
        with pytest.raises(GraphError, match=r"node n .* failed"):
            run_graph(graph_of(node), torch.ones(4))
