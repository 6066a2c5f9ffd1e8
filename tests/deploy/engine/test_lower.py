"""Lowering a graph: folding, renaming, and nodes left to torch."""

import torch

from optg.deploy.engine.lower import lower
from optg.deploy.graph import Node, Ref
from tests.deploy.engine.harness import compile_graph, conv_node, make_graph, relative_error, small_net


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


def test_arguments_may_be_named() -> None:
    """torch.export gives most arguments by position; a file may name any of them."""
    tensors = {"w": torch.randn(4, 3, 3, 3), "m": torch.rand(4), "v": torch.rand(4) + 0.5}
    statistics = {"running_mean": Ref("m"), "running_var": Ref("v"), "training": False, "momentum": 0.1, "eps": 1e-5}
    nodes = [
        Node("c", "aten.conv2d.default", (), {"weight": Ref("w"), "input": Ref("x"), "padding": [1, 1]}),
        Node("b", "aten.batch_norm.default", (Ref("c"),), {"weight": None, "bias": None, **statistics, "cudnn_enabled": False}),
        Node("l", "aten.leaky_relu.default", (), {"self": Ref("b"), "negative_slope": 0.3}),
        Node("p", "aten.max_pool2d.default", (Ref("l"),), {"kernel_size": [2, 2], "ceil_mode": True}),
        Node("a", "aten.add.Tensor", (Ref("p"),), {"other": Ref("p"), "alpha": 2}),
        Node("s", "aten.softmax.int", (), {"dim": 1, "self": Ref("a")}),
    ]
    graph = make_graph(nodes, Ref("s"), tensors, (3, 7, 7))
    assert not lower(graph).notes
    assert relative_error(graph, 1, "scalar", torch.randn(3, 3, 7, 7)) < 1e-5


def test_norm_with_statistics_of_another_shape_runs_in_torch() -> None:
    tensors = {"w": torch.randn(4, 3, 1, 1), "m": torch.rand(4, 1), "v": torch.rand(4, 1) + 0.5}
    norm = Node("b", "aten.batch_norm.default", (Ref("c"), None, None, Ref("m"), Ref("v"), False, 0.1, 1e-5, False))
    graph = make_graph([conv_node("c", "x", "w"), norm], Ref("b"), tensors, (3, 7, 7))
    assert lower(graph).notes == [
        "b (aten.batch_norm.default) runs in torch: its statistics are not one number for each channel"
    ]


def test_tensors_that_torch_creates_are_on_the_cpu() -> None:
    """The device in a file, or of a model that was captured on a GPU, does not count."""
    nodes = [
        Node("a", "aten.arange.default", (4,), {"device": torch.device("cuda")}),
        Node("n", "aten.add.Tensor", (Ref("x"), Ref("a"))),
    ]
    graph, x = make_graph(nodes, Ref("n"), {}, (3, 4, 4)), torch.randn(2, 3, 4, 4)
    assert torch.equal(compile_graph(graph)(x), x + torch.arange(4))


def test_a_mean_over_one_dimension_given_as_a_number_runs_in_torch() -> None:
    graph, x = make_graph([Node("m", "aten.mean.dim", (Ref("x"), 2, True))], Ref("m"), {}, (3, 4, 4)), torch.randn(2, 3, 4, 4)
    assert torch.allclose(compile_graph(graph)(x), x.mean(2, keepdim=True))


def test_a_stored_tensor_may_be_quantized() -> None:
    nodes = [
        Node("q", "optg.quantize_u8.default", (Ref("w"), 0.1, 7)),
        Node("d", "optg.dequantize_u8.default", (Ref("q"), 0.1, 7)),
        Node("n", "aten.add.Tensor", (Ref("x"), Ref("d"))),
    ]
    graph, x = make_graph(nodes, Ref("n"), {"w": torch.full((2, 3, 4, 4), 0.5)}, (3, 4, 4)), torch.randn(2, 3, 4, 4)
    graph.shapes = [(2, 3, 4, 4)]  # so that the tensor could be a batch
    assert torch.allclose(compile_graph(graph)(x), x + 0.5)


def test_an_empty_tensor_may_be_quantized() -> None:
    nodes = [
        Node("r", "aten.relu.default", (Ref("w"),)),
        Node("q", "optg.quantize_u8.default", (Ref("r"), 0.1, 7)),
    ]
    graph, x = make_graph(nodes, (Ref("q"), Ref("x")), {"w": torch.ones(2, 0, 3, 1)}, (3, 4, 4)), torch.randn(2, 3, 4, 4)
    graph.shapes = [(2, 3, 4, 4)]  # so that the tensor could be a batch
    assert compile_graph(graph)(x)[0].shape == (2, 0, 3, 1)
