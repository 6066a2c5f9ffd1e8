"""Whole int8 nets, and how many images share a plane."""

import pytest
import torch

from optg.deploy.engine.int8.segment import Int8Segment
from tests.deploy.engine.int8.graphs import INT8_ISAS, Builder, check, compile_int8, small_int8_net


@pytest.mark.parametrize("isa", INT8_ISAS)
def test_a_net_with_every_operation(isa: str, poisoned_bytes: None) -> None:
    for batch, threads in ((1, 1), (1, 3), (7, 2), (33, 2)):
        check(small_int8_net(), torch.randn(batch, 3, 13, 11), threads=threads, isa=isa)


def test_small_images_share_planes() -> None:
    b = Builder((8, 2, 2))
    b.quantize(b.aten("conv2d", b.input(), b.weight(8, 8, 3, 3), None, [1, 1], [1, 1]), 0.1, 3)
    fast = compile_int8(b.graph())
    [segment] = fast.network.parts
    assert isinstance(segment, Int8Segment)
    assert [segment.group(batch) for batch in (1, 4, 64)] == [1, 4, 32]
    fast(torch.randn(70, 8, 2, 2))
    assert sorted(segment.programs) == [1, 32]


def test_large_images_have_planes_of_their_own() -> None:
    b = Builder((8, 62, 63))
    b.quantize(b.aten("conv2d", b.input(), b.weight(8, 8, 3, 3), None, [1, 1], [1, 1]), 0.1, 3)
    [segment] = compile_int8(b.graph()).network.parts
    assert isinstance(segment, Int8Segment) and segment.group(64) == 1
