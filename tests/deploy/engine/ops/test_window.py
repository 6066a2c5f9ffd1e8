"""Several operations with windows on one value, which need different layouts of it."""

from itertools import product

import pytest
import torch

from optg.deploy.graph import Node, Ref, run_graph
from tests.deploy.engine.harness import ISAS, compile_graph, conv_node, make_graph, relative_error


@pytest.mark.parametrize("isa", ISAS)
def test_two_windows_on_one_value(isa: str, poisoned: None) -> None:
    """The first window skips the padding; the second reads some of it, but less than the first would."""
    torch.manual_seed(7)
    for first, second, batch in product([(3, 3), (1, 3), (3, 1)], [(1, 3), (3, 1), (3, 3)], (1, 8, 16)):
        weights = {"v": torch.randn(6, 6, *first) * (torch.rand(6, 6, *first) < 0.1), "w": torch.randn(6, 6, *second)}
        nodes = [
            conv_node(name, "x", w, padding=[k // 2 for k in size]) for name, w, size in (("a", "v", first), ("b", "w", second))
        ]
        nodes.append(Node("s", "aten.add.Tensor", (Ref("a"), Ref("b"))))
        graph = make_graph(nodes, Ref("s"), weights, (6, 4, 4))
        assert relative_error(graph, 1, isa, torch.randn(batch, 6, 4, 4), cut=0) < 1e-5, (first, second, batch)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("op", ["aten.mean.dim", "aten.relu.default", "aten.softmax.int", "aten.add.Tensor"])
def test_one_op_reads_some_pixels_and_another_all(op: str, isa: str, poisoned: None) -> None:
    """A convolution that skips pixels has a place of its own, whose form other operations must not copy."""
    torch.manual_seed(9)
    args = {"aten.mean.dim": ([2, 3], True), "aten.softmax.int": (1,), "aten.add.Tensor": (Ref("x"),)}.get(op, ())
    for size, stride, batch in product([(2, 8), (9, 7)], (2, 3), (1, 3, 16)):
        nodes = [conv_node("c", "x", "w", stride), Node("o", op, (Ref("x"), *args))]
        graph = make_graph(nodes, (Ref("c"), Ref("o")), {"w": torch.randn(4, 4, 1, 1)}, (4, *size))
        x = torch.randn(batch, 4, *size)
        for got, exact in zip(compile_graph(graph, isa=isa, cut=0)(x), run_graph(graph, x), strict=True):
            assert torch.allclose(got, exact, atol=1e-5), (size, stride, batch)
