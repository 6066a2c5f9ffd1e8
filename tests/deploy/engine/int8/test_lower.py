"""What is lowered to operations on bytes, and what stays in float."""

import pytest
import torch

from optg.deploy.compile import Compiled
from optg.deploy.engine.int8.segment import Int8Segment
from optg.deploy.engine.plan import Segment
from optg.deploy.graph import Ref, run_graph
from tests.deploy.engine.int8.graphs import AnyTiling, Builder, compile_int8


def kinds(fast: Compiled) -> list[str]:
    return [type(op).__name__ for part in fast.network.parts if isinstance(part, Int8Segment) for op in part.ops]


def test_a_residual_block_becomes_two_convolutions() -> None:
    b = Builder((4, 8, 8))
    x = b.input()
    y = b.quantize(b.aten("relu", b.aten("conv2d", x, b.weight(4, 4, 3, 3), None, [1, 1], [1, 1])), 0.03, 0, show=False)
    z = b.aten("conv2d", y, b.weight(4, 4, 1, 1))
    b.quantize(b.aten("relu", b.aten("add.Tensor", x, z)), 0.04, 0)
    assert kinds(compile_int8(b.graph())) == ["Quantize", "Convolution", "Convolution", "Dequantize"]


def test_a_value_needed_in_float_is_computed_once() -> None:
    """A convolution's float result is also an output: it is written as floats, and quantized from there."""
    b = Builder((4, 6, 6))
    y = b.aten("conv2d", b.input(), b.weight(4, 4, 3, 3))
    b.quantize(y, 0.03, 9)
    graph = b.graph(y)
    fast = Compiled(graph, 1, None, AnyTiling)
    assert kinds(fast) == ["Quantize", "Convolution", "Quantize", "Dequantize"] and not fast.notes
    x = torch.randn(2, 4, 6, 6)
    for got, want in zip(fast(x), run_graph(graph, x)):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=0.03)


def test_layers_without_quantization_run_in_the_float_engine() -> None:
    b = Builder((4, 6, 6))
    b.tensors["f"] = torch.randn(4, 4, 3, 3)
    y = b.quantize(b.aten("conv2d", b.input(), b.weight(4, 4, 1, 1)), 0.03, 9)
    z = b.aten("conv2d", y, Ref("f"), None, [1, 1], [1, 1])
    b.quantize(z, 0.5, 100)
    graph, x = b.graph(), torch.randn(3, 4, 6, 6)
    fast = Compiled(graph, 1, None)
    assert [type(part) for part in fast.network.parts] == [Int8Segment, Segment, Int8Segment]
    for got, want, scale in zip(fast(x), run_graph(graph, x), (0.03, 0.5)):
        assert (got - want).abs().max() <= 1.001 * scale


def test_bytes_pass_by_an_operation_that_torch_runs() -> None:
    b = Builder((4, 6, 6))
    x = b.quantize(b.aten("conv2d", b.input(), b.weight(4, 4, 1, 1)), 0.05, 100)
    odd = b.quantize(b.aten("cumsum", x, 2), 0.1, 50)
    b.quantize(b.aten("add.Tensor", x, odd), 0.1, 80)
    graph, image = b.graph(), torch.randn(3, 4, 6, 6)
    fast = Compiled(graph, 2, None, AnyTiling)
    assert any("cumsum" in note for note in fast.notes)
    for got, want, scale in zip(fast(image), run_graph(graph, image), (0.05, 0.1, 0.1)):
        assert (got - want).abs().max() <= 8 * scale


def test_a_maximum_with_another_scale_runs_in_float() -> None:
    b = Builder((4, 6, 6))
    b.quantize(b.aten("max_pool2d", b.input(scale=0.02), [2, 2]), 0.03, 9)
    fast = Compiled(b.graph(), 1, None)
    assert any("different scales" in note for note in fast.notes)
    x = torch.randn(2, 4, 6, 6)
    assert torch.equal(fast(x)[0], run_graph(b.graph(), x)[0])


@pytest.mark.parametrize("scale, zero_point", [(0.0, 3), (float("nan"), 3), (float("inf"), 3), (-1.0, 3)])
def test_impossible_scales_are_left_to_torch(scale: float, zero_point: int) -> None:
    b = Builder((4, 6, 6))
    b.quantize(Ref("x"), scale, zero_point)
    assert any("expected a positive number" in note for note in Compiled(b.graph(), 1, None).notes)


def test_float_models_get_no_notes_about_bytes() -> None:
    b = Builder((4, 6, 6))
    b.tensors["f"] = torch.randn(4, 4, 3, 3)
    y = b.aten("relu", b.aten("conv2d", Ref("x"), Ref("f"), None, [1, 1], [1, 1]))
    assert not Compiled(b.graph(b.aten("adaptive_avg_pool2d", b.aten("max_pool2d", y, [2, 2]), [1, 1])), 1, None).notes


def test_only_float32_is_quantized_to_bytes() -> None:
    b = Builder((4, 6, 6))
    b.quantize(b.aten("to.dtype", Ref("x"), torch.bfloat16), 0.03, 9)
    fast, x = Compiled(b.graph(), 1, None), torch.randn(2, 4, 6, 6)
    assert any("in float32" in note for note in fast.notes)
    assert torch.equal(fast(x)[0], run_graph(b.graph(), x)[0])
