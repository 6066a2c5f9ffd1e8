"""Reshapes against torch."""

from dataclasses import replace

import pytest
import torch

from optg.deploy.graph import Node, Ref, run_graph
from tests.deploy.engine.harness import ISAS, check_ops, compile_graph, make_graph, one_op

RESHAPES = [("flatten.using_ints", (1,))]


@pytest.mark.parametrize("isa", ISAS)
def test_reshapes(isa: str, poisoned: None) -> None:
    check_ops(RESHAPES, isa)


@pytest.mark.parametrize(
    ("op", "arguments"),
    [
        ("squeeze.dim", (0,)),
        ("squeeze.dim", (-4,)),
        ("squeeze.dims", ([0, 1],)),
        ("squeeze.default", ()),
        ("squeeze.dim", (1,)),
    ],
)
@pytest.mark.parametrize("batch", [1, 3])
def test_squeeze_may_remove_the_batch_of_a_single_image(op: str, arguments: tuple[object, ...], batch: int) -> None:
    squeeze = one_op(op, arguments, (1, 4, 4))
    graph = replace(
        squeeze, nodes=[Node("r", "aten.relu.default", (Ref("x"),)), Node("n", f"aten.{op}", (Ref("r"), *arguments))]
    )
    x = torch.randn(batch, 1, 4, 4)
    assert torch.equal(compile_graph(graph)(x), run_graph(graph, x))


def test_squeeze_of_a_stored_tensor_runs_in_torch() -> None:
    nodes = [Node("s", "aten.squeeze.dim", (Ref("t"), 0)), Node("n", "aten.add.Tensor", (Ref("x"), Ref("s")))]
    graph, x = make_graph(nodes, Ref("n"), {"t": torch.ones(1, 4, 4)}, (3, 4, 4)), torch.randn(2, 3, 4, 4)
    assert torch.equal(compile_graph(graph)(x), x + 1)


def test_reshape_of_a_value_whose_size_depends_on_the_batch_runs_in_torch() -> None:
    """A convolution with its own input as its weight: the number of channels is the batch size."""
    nodes = [
        Node("c", "aten.conv2d.default", (Ref("x"), Ref("x"))),
        Node("n", "aten.clone.default", (Ref("c"),)),
        Node("r", "aten.relu.default", (Ref("x"),)),
    ]
    graph, x = make_graph(nodes, [Ref("n"), Ref("r")], {}, (3, 4, 4)), torch.randn(2, 3, 4, 4)
    for found, expected in zip(compile_graph(graph)(x), run_graph(graph, x)):
        torch.testing.assert_close(found, expected)


def test_reshape_after_the_batch_of_a_single_image_was_removed_runs_in_torch() -> None:
    nodes = [
        Node("s", "aten.squeeze.default", (Ref("x"),)),
        Node("n", "aten.unsqueeze.default", (Ref("s"), 1)),
        Node("r", "aten.relu.default", (Ref("x"),)),
    ]
    graph = make_graph(nodes, [Ref("n"), Ref("r")], {}, (16,))
    for batch in (1, 3):
        x = torch.randn(batch, 16)
        assert all(map(torch.equal, compile_graph(graph)(x), run_graph(graph, x)))
