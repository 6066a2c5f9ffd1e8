"""Convolutions and pools whose values lie pixel by pixel, against the integer reference."""

import random

import numpy as np
import pytest
import torch

from optg.deploy.engine.int8 import convolution
from optg.deploy.engine.int8.picks import block_weights, make_picks, schedule
from optg.deploy.engine.int8.pixels import Pixels
from optg.deploy.graph import Ref
from tests.deploy.engine.harness import FLAGS
from tests.deploy.engine.int8.graphs import Builder, check, compile_int8
from tests.deploy.engine.int8.test_convolution import random_convolution

pytestmark = pytest.mark.skipif(not {"avx512vbmi", "avx512_vnni"} <= set(FLAGS), reason="needs AVX-512 with VBMI and VNNI")


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(convolution, "prefers_pixels", lambda op, places: op.groups == 1)


def functions(fast: object) -> list[str]:
    """Return the C functions that a compiled model calls."""
    return [call.function for part in fast.network.parts for p in part.programs.values() for call in p.steps]  # type: ignore[attr-defined]


def test_random_convolutions_on_pixels_equal_the_reference(always: None, poisoned_bytes: None) -> None:
    rng = random.Random(11)
    for _ in range(60):
        graph, xs, threads = random_convolution(rng)
        check(graph, *xs, threads=threads, isa="native")


@pytest.mark.long
def test_many_random_convolutions_on_pixels_equal_the_reference(always: None, poisoned_bytes: None) -> None:
    rng = random.Random(12)
    for _ in range(1500):
        graph, xs, threads = random_convolution(rng)
        check(graph, *xs, threads=threads, isa="native")


@pytest.mark.parametrize("size", [(1, 1), (2, 2), (3, 4), (7, 7), (5, 13)])
@pytest.mark.parametrize("channels", [3, 64, 65, 200])
def test_chains_of_layers(size: tuple[int, int], channels: int, always: None, poisoned_bytes: None) -> None:
    """The second layer reads the pixels of the first one, a residual among them; a pool and a sum on planes follow."""
    for batch, stride in ((1, 1), (3, 2)):
        b = Builder((channels, *size), (channels, *size))
        weight = b.weight(channels, channels, 3, 3, density=0.1)
        y = b.aten("add.Tensor", b.aten("conv2d", b.input(), weight, None, [1, 1], [1, 1]), b.input(1))
        y = b.quantize(b.aten("relu", y), 0.2, 3)
        z = b.quantize(b.aten("conv2d", y, b.weight(19, channels, 3, 3), b.bias(19), [stride, stride], [1, 1]), 0.3, 100)
        b.quantize(b.aten("max_pool2d", z, [2, 3], [1, 2], [1, 1]), 0.3, 100)
        b.quantize(b.aten("add.Tensor", z, z), 0.5, 7)
        graph, xs = b.graph(), [torch.randn(batch, channels, *size), torch.randn(batch, channels, *size)]
        check(graph, *xs, threads=2)


def test_extreme_weights_and_inputs(always: None) -> None:
    for value in (0, 255):
        b = Builder((130, 3, 3))
        x = b.quantize(Ref("x"), 0.5, 255 - value)
        weight = b.weight(33, 130, 3, 3, density=1.0)
        b.tensors[str(b.nodes[-1].args[0].name)].fill_(127 if value else -127)
        b.quantize(b.aten("conv2d", x, weight, None, [1, 1], [1, 1]), 3.0, 128)
        check(b.graph(), torch.full((1, 130, 3, 3), 1000.0 if value else -1000.0))


def test_the_faster_layout_is_chosen() -> None:
    few = Builder((256, 2, 2))
    few.quantize(few.aten("conv2d", few.input(), few.weight(256, 256, 3, 3, density=0.1), None, [1, 1], [1, 1]), 0.1, 3)
    fast = compile_int8(few.graph(), isa="native")
    fast(torch.randn(1, 256, 2, 2))
    assert "int8_pixels" in functions(fast)
    many = Builder((16, 40, 40))
    many.quantize(many.aten("conv2d", many.input(), many.weight(16, 16, 3, 3, density=0.1), None, [1, 1], [1, 1]), 0.1, 3)
    fast = compile_int8(many.graph(), isa="native")
    fast(torch.randn(1, 16, 40, 40))
    assert "int8_convolution" in functions(fast)


@pytest.mark.parametrize("density", [0.01, 0.1, 0.3, 1.0])
def test_picks_hold_every_weight_once(density: float) -> None:
    rng = np.random.default_rng(0)
    weight = (rng.integers(-127, 128, (37, 100, 3, 2)) * (rng.random((37, 100, 3, 2)) < density)).astype(np.int8)
    blocks = block_weights(weight)
    plan = schedule(blocks)
    picks = make_picks(blocks, plan)
    found = np.zeros_like(blocks, np.int64)
    pick = 0
    for group, count in enumerate(picks.counts):
        for index, values in picks.table[pick : pick + count]:
            for lane in np.flatnonzero(values):
                block = picks.blocks[pick // 2, index[lane] // 64]
                found[group, lane // 4, block, index[lane] % 64] += values.view(np.int8)[lane]
            pick += 1
    assert np.array_equal(found, blocks)
    assert pick == len(picks.table) == 2 * len(picks.blocks)


def test_holes_are_what_no_pixel_fills() -> None:
    value = Pixels((70, 2, 3), 2)
    value.geometry.need(5, 4)
    value.pad(1, 2)
    memory = np.zeros(value.size, int)
    for first, length in value.holes():
        memory[value.lead + first : value.lead + first + length] += 1
    for start in value.offsets((2, 3)).ravel():
        memory[value.lead + start : value.lead + start + value.pixel] += 1
    assert (memory == 1).all()
