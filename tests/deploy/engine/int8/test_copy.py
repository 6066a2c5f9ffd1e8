"""Quantizing and dequantizing against the integer reference."""

import pytest
import torch

from optg.deploy.graph import Ref
from tests.deploy.engine.int8.graphs import INT8_ISAS, Builder, check, check_against_torch


@pytest.mark.parametrize("isa", INT8_ISAS)
def test_every_float_is_quantized(isa: str) -> None:
    special = torch.tensor(
        [float("nan"), float("inf"), -float("inf"), 3e38, -3e38, 0.0, -0.0, 0.5, 1.5, 2.5, -0.5, 254.5, 1e-40]
    )
    x = torch.cat([special, 200 * torch.randn(500)])
    for zero_point in (0, 100, 255):
        b = Builder((len(x),))
        b.quantize(Ref("x"), 1.0, zero_point)
        check(b.graph(), x[None], isa=isa)
        image = Builder((1, 19, 27))
        image.quantize(Ref("x"), 0.7, zero_point)
        check(image.graph(), x[None, None, :513].reshape(1, 1, 19, 27), isa=isa)


def test_quantizing_equals_torch() -> None:
    b = Builder((3, 20, 30))
    b.quantize(Ref("x"), 0.0123, 77)
    check_against_torch(b.graph(), torch.randn(2, 3, 20, 30), steps=0)
