"""optg's own operations for int8: what they compute, what of PT2E becomes one, and which weights are valid."""

import math
from typing import Any

import pytest
import torch
import torch.ao.quantization.fx._decomposed
from torch import Tensor

from optg.deploy.graph import Graph, GraphError, Node, Ref, as_float, check_weights, count_graph, is_quantized, run_graph
from optg.deploy.graph.int8 import DEQUANTIZE, QUANTIZE, WEIGHT, hidden_bytes, translate_pt2e
from tests.deploy.engine.int8.graphs import Builder, small_int8_net

PT2E, OWN = torch.ops.quantized_decomposed, torch.ops.optg
U8 = (0, 255, torch.uint8)
S8 = (0, -127, 127, torch.int8)


def test_operations_equal_those_of_pt2e() -> None:
    x = torch.cat([torch.randn(1000) * 9, torch.tensor([0.0, 1e30, -1e30, math.inf, -math.inf])])
    for scale, zero_point in ((0.03, 0), (0.1, 128), (7.0, 255)):
        q = OWN.quantize_u8(x, scale, zero_point)
        assert q.dtype == torch.uint8 and torch.equal(q, PT2E.quantize_per_tensor(x, scale, zero_point, *U8))
        assert torch.equal(OWN.dequantize_u8(q, scale, zero_point), PT2E.dequantize_per_tensor(q, scale, zero_point, *U8))
    assert OWN.quantize_u8(torch.tensor([math.nan]), 0.1, 99).item() == 0
    weight, scale = torch.randint(-127, 128, (5, 3, 2, 2), dtype=torch.int8), torch.rand(5)
    expected = PT2E.dequantize_per_channel(weight, scale, torch.zeros(5, dtype=torch.int64), *S8)
    assert torch.equal(OWN.dequantize_s8(weight, scale), expected)


def graph_of(nodes: list[Node], **tensors: Tensor) -> Graph:
    kinds = dict.fromkeys(tensors, "buffer")
    return Graph(["x"], [(None, 4)], [torch.float32], nodes, Ref(nodes[-1].name), tensors, kinds)  # type: ignore[arg-type]


def pt2e(name: str, *args: Any) -> list[Node]:
    return [Node("n", f"quantized_decomposed.{name}.default", args)]


W, SCALE, ZEROS = torch.ones(3, 4, dtype=torch.int8), torch.ones(3), torch.zeros(3, dtype=torch.int64)


def test_operations_of_pt2e_are_translated() -> None:
    for name, own in (("quantize_per_tensor", QUANTIZE), ("dequantize_per_tensor", DEQUANTIZE)):
        graph = translate_pt2e(graph_of(pt2e(name, Ref("x"), 0.1, 3, *U8)))
        assert graph.nodes == [Node("n", own, (Ref("x"), 0.1, 3))]
    weight = graph_of(pt2e("dequantize_per_channel", Ref("w"), Ref("s"), Ref("z"), *S8), w=W, s=SCALE, z=ZEROS)
    weight.aliases = {"z2": "z", "w2": "w"}
    graph = translate_pt2e(weight)
    assert graph.nodes == [Node("n", WEIGHT, (Ref("w"), Ref("s")))] and is_quantized(graph)
    assert graph.tensors.keys() == graph.kinds.keys() == {"w", "s"} and graph.aliases == {"w2": "w"}


@pytest.mark.parametrize(
    "node, tensors",
    [
        (pt2e("quantize_per_tensor", Ref("x"), 0.1, 3, 0, 127, torch.uint8), {}),
        (pt2e("quantize_per_tensor", Ref("x"), 0.1, 3, -128, 127, torch.int8), {}),
        (pt2e("quantize_per_tensor", Ref("x"), 0.0, 3, *U8), {}),
        (pt2e("quantize_per_tensor", Ref("x"), math.nan, 3, *U8), {}),
        (pt2e("quantize_per_tensor", Ref("x"), 0.1, 256, *U8), {}),
        (pt2e("dequantize_per_channel", Ref("w"), Ref("s"), Ref("z"), *S8), {"z": ZEROS + 1}),
        (pt2e("dequantize_per_channel", Ref("w"), Ref("s"), Ref("z"), *S8), {"w": W - 129}),
        (pt2e("dequantize_per_channel", Ref("w"), Ref("s"), Ref("z"), 1, -127, 127, torch.int8), {}),
        (pt2e("dequantize_per_channel", Ref("x"), Ref("s"), Ref("z"), *S8), {}),
    ],
)
def test_other_quantizations_of_pt2e_stay(node: list[Node], tensors: dict[str, Tensor]) -> None:
    graph = graph_of(node, **{"w": W, "s": SCALE, "z": ZEROS, **tensors})
    assert translate_pt2e(graph).nodes == node


WIDE = torch.full((1, 33_156), 127, dtype=torch.int8)


@pytest.mark.parametrize(
    "tensors, problem",
    [
        ({}, ""),
        ({"w": WIDE[:, 1:], "s": SCALE[:1]}, ""),
        ({"w": torch.where(torch.arange(66_000) % 2 > 0, 127, -127).to(torch.int8)[None], "s": SCALE[:1]}, ""),
        ({"w": WIDE, "s": SCALE[:1]}, "a sum of its products may reach 2,147,514,120, more than 32 bits hold"),
        ({"w": -WIDE, "s": SCALE[:1]}, "more than 32 bits hold"),
        ({"w": W - 129}, "a weight is below -127; expected -127 to 127"),
        ({"s": torch.tensor([1.0, 0.0, 1.0])}, "a scale of its weights is not a number from"),
        ({"s": torch.tensor([1.0, math.nan, 1.0])}, "a scale of its weights is not a number from"),
        ({"s": torch.tensor([1.0, math.inf, 1.0])}, "a scale of its weights is not a number from"),
        ({"s": -SCALE}, "a scale of its weights is not a number from"),
        ({"s": torch.ones(4)}, "a float32 scale for each output channel"),
        ({"s": SCALE.double()}, "a float32 scale for each output channel"),
        ({"w": W.int()}, "expected int8 weights"),
        ({"w": W[:, 0]}, "of at least two dimensions"),
    ],
)  # fmt: skip
def test_weights_are_checked(tensors: dict[str, Tensor], problem: str) -> None:
    for node in (Node("n", WEIGHT, (Ref("w"), Ref("s"))), Node("n", WEIGHT, (), {"scale": Ref("s"), "weight": Ref("w")})):
        graph = graph_of([node], **{"w": W, "s": SCALE, **tensors})
        if not problem:
            check_weights(graph)
            continue
        with pytest.raises(GraphError, match=problem):
            check_weights(graph)


def test_weights_must_be_stored() -> None:
    copied = [Node("c", "aten.clone.default", (Ref("w"),)), Node("n", WEIGHT, (Ref("c"), Ref("s")))]
    with pytest.raises(GraphError, match="its weight and scale are computed; expected stored ones"):
        check_weights(graph_of(copied, w=W, s=SCALE))


def test_hidden_bytes_are_only_dequantized() -> None:
    def bytes_of(*users: Node) -> set[str]:
        return hidden_bytes(
            graph_of([Node("q", QUANTIZE, (Ref("x"), 0.1, 3)), *users, Node("end", "aten.relu.default", (Ref("x"),))])
        )

    same = Node("d", DEQUANTIZE, (Ref("q"), 0.1, 3))
    assert bytes_of(same) == {"q"}
    assert bytes_of(same, Node("e", DEQUANTIZE, (Ref("q"), 0.2, 3))) == set()
    assert bytes_of(same, Node("e", "aten.flip.default", (Ref("q"), [1]))) == set()


def test_float_model_has_the_weights_that_the_bytes_stand_for() -> None:
    graph = small_int8_net()
    floats, x = as_float(graph), torch.randn(2, 3, 13, 11)
    assert not is_quantized(floats) and all(t.dtype == torch.float32 for t in floats.tensors.values())
    assert not any(node.op.startswith("optg.") for node in floats.nodes)
    exact, rounded = run_graph(floats, x)[-1], run_graph(graph, x)[-1]
    assert exact.shape == rounded.shape and (exact - rounded).abs().max() < 0.2 * exact.abs().max()


def test_parameters_and_flops_are_counted() -> None:
    b = Builder((2, 4, 4))
    y = b.quantize(b.aten("conv2d", b.input(), b.weight(3, 2, 1, 1, density=1), b.bias(3)), 0.1, 9)
    b.tensors["w0"] = torch.tensor([[1, 0], [0, 0], [2, 3]], dtype=torch.int8).reshape(3, 2, 1, 1)
    b.tensors["f"] = torch.tensor([[0.0] * 48, [1.0] * 48])
    graph = b.graph(b.aten("linear", b.aten("flatten.using_ints", y, 1), Ref("f")))
    graph.kinds["w0"] = graph.kinds["w0_scale"] = "buffer"
    assert count_graph(graph) == {
        "parameters": 6 + 3 + 96,
        "nonzero": 3 + 3 + 48,
        "flops": 3 * 16 + 48,
        "dense_flops": 6 * 16 + 96,
    }
