"""Int8 sums, functions by table and concatenation against the integer reference."""

import pytest
import torch

from optg.deploy.compile import Compiled
from optg.deploy.graph import Ref
from tests.deploy.engine.int8.graphs import INT8_ISAS, Builder, check, check_against_torch, compile_int8


@pytest.mark.parametrize("isa", INT8_ISAS)
@pytest.mark.parametrize("clamp", ["", "relu", "relu6"])
def test_add(clamp: str, isa: str, poisoned_bytes: None) -> None:
    for batch, size in ((1, (5, 9)), (3, (8, 8))):
        b = Builder((4, *size), (4, *size))
        y = b.aten("add.Tensor", b.input(0), b.input(1))
        y = b.quantize(b.aten(clamp, y) if clamp else y, 0.03, 31)
        b.quantize(b.aten("conv2d", y, b.weight(4, 4, 3, 3), None, [1, 1], [1, 1]), 0.05, 3)  # reads the padding
        xs = torch.randn(batch, 4, *size), torch.randn(batch, 4, *size)
        check(b.graph(), *xs, threads=2, isa=isa)


@pytest.mark.parametrize("scale, runs", [(1.0, True), (1e3, True), (1e6, False), (1e30, False)])
def test_a_sum_that_may_overflow_runs_in_float(scale: float, runs: bool) -> None:
    b = Builder((4, 6, 6), (4, 6, 6))
    b.quantize(b.aten("add.Tensor", b.input(0, scale), b.input(1, scale)), 1e-3, 31)
    x, y = (100 * scale * torch.randn(2, 4, 6, 6) for _ in range(2))
    if runs:
        check(b.graph(), x, y)
    else:
        assert any("may exceed 32 bits" in note for note in Compiled(b.graph(), 1).notes)


def test_a_sum_is_within_one_step_of_torch() -> None:
    b = Builder((4, 6, 6), (4, 6, 6))
    b.quantize(b.aten("add.Tensor", b.input(0), b.input(1)), 0.03, 31)
    check_against_torch(b.graph(), torch.randn(2, 4, 6, 6), torch.randn(2, 4, 6, 6))


@pytest.mark.parametrize("isa", INT8_ISAS)
def test_every_byte_goes_through_a_table(isa: str, poisoned_bytes: None) -> None:
    b = Builder((1, 16, 17))
    x = b.quantize(Ref("x"), 1.0, 0, show=False)
    y = b.quantize(b.aten("tanh", x), 0.01, 200)
    b.quantize(b.aten("conv2d", y, b.weight(3, 1, 3, 3), None, [1, 1], [1, 1]), 0.05, 3)  # reads the padding
    check(b.graph(), torch.arange(272.0).reshape(1, 1, 16, 17), isa=isa)


@pytest.mark.parametrize(
    "function", ["relu", "hardswish", "hardsigmoid", "sigmoid", "silu", "tanh", "leaky_relu", "gelu", "elu"]
)
def test_functions_equal_torch(function: str) -> None:
    b = Builder((3, 4, 5))
    b.quantize(b.aten(function, b.input()), 0.02, 55)
    check(b.graph(), 2 * torch.randn(3, 3, 4, 5), threads=2)
    check_against_torch(b.graph(), 2 * torch.randn(3, 3, 4, 5), steps=0)
    assert f"int8 {function}" in repr(compile_int8(b.graph()))


@pytest.mark.parametrize("isa", INT8_ISAS)
def test_concat_rescales_its_inputs(isa: str, poisoned_bytes: None) -> None:
    for batch in (1, 4):
        b = Builder((3, 6, 7), (5, 6, 7))
        y = b.quantize(b.aten("cat", [b.input(0), b.input(1), b.input(0)], 1), 0.04, 120)
        b.quantize(b.aten("conv2d", y, b.weight(4, 11, 3, 3), None, [1, 1], [1, 1]), 0.05, 3)  # reads the padding
        check(b.graph(), torch.randn(batch, 3, 6, 7), torch.randn(batch, 5, 6, 7), threads=2, isa=isa)
