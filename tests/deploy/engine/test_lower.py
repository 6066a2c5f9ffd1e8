"""Lowering a graph: folding, renaming, and nodes left to torch."""

import torch

from optg.deploy.engine.lower import lower
from optg.deploy.graph import Node, Ref
from tests.deploy.engine.harness import conv_node, make_graph, small_net


def test_norms_sums_and_activations_become_part_of_convolutions() -> None:
    network = lower(small_net())
    [segment] = network.parts
    assert [(type(op).__name__, op.output, op.inputs) for op in segment.ops] == [
        ("Convolution", "relu", ["x"]),
        ("Convolution", "a_relu", ["relu"]),
        ("Convolution", "c", ["relu"]),
        ("Convolution", "sum", ["a_relu", "c"]),
        ("Convolution", "sum_norm", ["sum"]),
        ("Concat", "cat", ["sum_norm", "c"]),
        ("Pool", "pool", ["cat"]),
        ("Convolution", "d", ["pool"]),
        ("Convolution", "fc", ["d"]),
    ]
    assert network.roots == {"flat": "d"} and not network.notes
    assert segment.inputs == ["x"] and segment.outputs == ["fc"]


def test_an_operation_that_is_used_twice_keeps_its_output() -> None:
    nodes = [conv_node("c", "x", "w"), Node("r", "aten.relu.default", (Ref("c"),))]
    network = lower(make_graph(nodes, (Ref("c"), Ref("r")), {"w": torch.ones(2, 3, 1, 1)}, (3, 4, 4)))
    [segment] = network.parts
    assert [op.output for op in segment.ops] == ["c", "r"] and segment.outputs == ["c", "r"]


def test_torch_runs_unsupported_operations_between_segments() -> None:
    nodes = [
        conv_node("c", "x", "w"),
        Node("s", "aten.sin.default", (Ref("c"),)),
        Node("r", "aten.relu.default", (Ref("s"),)),
        Node("unused", "aten.sigmoid.default", (Ref("s"),)),
    ]
    network = lower(make_graph(nodes, Ref("r"), {"w": torch.ones(2, 3, 1, 1)}, (3, 4, 4)))
    assert [(part.inputs, part.outputs) for part in network.parts] == [(["x"], ["c"]), (["c"], ["s"]), (["s"], ["r"])]
    assert network.notes == ["s (aten.sin.default) runs in torch"]
