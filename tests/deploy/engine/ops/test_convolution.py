"""Convolutions against torch in float64: random shapes, every kernel, every tiling."""

import random
from itertools import product
from typing import Any

import pytest
import torch

from optg.deploy.engine import build
from optg.deploy.engine.ops import tiles
from optg.deploy.engine.ops.tiles import Layer, Tiling
from optg.deploy.graph import Node, Ref, run_graph
from tests.deploy.engine.harness import (
    ISAS,
    RandomTuner,
    compile_graph,
    conv_node,
    make_graph,
    random_convolution,
    relative_error,
)


@pytest.mark.parametrize("isa", ISAS)
def test_random_convolutions(isa: str, poisoned: None, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(1)
    torch.manual_seed(1)
    monkeypatch.setattr(tiles, "FEWEST", 0.1)
    RandomTuner.parts.clear()
    for case in range(120):
        graph, inputs, threads, cut = random_convolution(rng)
        monkeypatch.setattr(tiles, "PARTS", rng.choice([(45e3,), (1000, 300, 50)]))
        error = relative_error(graph, threads, isa, *inputs, cut=cut)
        assert error < 1e-5, (case, error, graph.nodes, [x.shape for x in inputs])
    assert len(RandomTuner.parts) > 2


@pytest.mark.parametrize("padding", [(1, 0), (0, 1), (1, 1)])
def test_every_tiling_of_a_padded_1x1_convolution(padding: tuple[int, int]) -> None:
    torch.manual_seed(8)
    weight = torch.randn(8, 3, 1, 1)
    for size, batch in product([(8, 8), (8, 4), (3, 5)], (1, 16)):
        graph = make_graph([conv_node("c", "x", "w", padding=padding)], Ref("c"), {"w": weight}, (3, *size))
        x = torch.randn(batch, 3, *size)
        exact = torch.nn.functional.conv2d(x.double(), weight.double(), padding=padding)
        tried = 0
        while True:
            count = 0

            class OneTiling(RandomTuner):
                def choose(self, layer: Layer, arena: int, i: int = tried) -> Any:
                    nonlocal count
                    tilings = layer.candidates()
                    count = len(tilings)
                    layer.fill(tilings[i])
                    return tilings[i]

            fast = compile_graph(graph, cut=0, tuner=OneTiling)
            assert (fast(x) - exact).abs().max() < 1e-5, (size, batch, tried)
            tried += 1
            if tried == count:
                break


def test_every_kernel() -> None:
    """Use every kernel on a layer that is as large as the largest one."""
    library = build.library()
    used: set[Any] = set()
    torch.manual_seed(5)
    for stride, size in ((1, 36), (2, 36), (3, 40)):
        weight = torch.randn(8, 2, 3, 3) * (torch.rand(8, 2, 3, 3) < 0.5)
        graph = make_graph([conv_node("c", "x", "w", stride, 1)], Ref("c"), {"w": weight}, (2, size, size))
        x = torch.randn(16, 2, size, size)
        exact = run_graph(graph, x.double(), tensors={"w": weight.double()})
        for kernel in library.kernels:
            if kernel.framed or kernel.stride not in (stride, 0):
                continue

            class OneKernel(RandomTuner):
                def choose(self, layer: Layer, arena: int, k: Any = kernel) -> Any:
                    tiling = Tiling(*k[:3])
                    used.update([k] if layer.possible(tiling) else [])
                    return layer.fill(tiling if layer.possible(tiling) else Tiling(1, 1, 1))

            fast = compile_graph(graph, cut=0, tuner=OneKernel)
            assert (fast(x) - exact).abs().max() < 1e-5 * exact.abs().max(), kernel
    assert used == {kernel for kernel in library.kernels if not kernel.framed}


@pytest.mark.parametrize("isa", ISAS)
def test_framed_kernels_skip_the_padding_of_small_images(isa: str, poisoned: None) -> None:
    """Kernels that compute a whole image skip the taps that would read outside it."""
    torch.manual_seed(6)
    framed = 0
    for size in range(1, 7):
        for kernel, density in (((3, 3), 0.2), ((3, 1), 0.2), ((1, 3), 0.0), ((3, 3), 0.9)):
            weight = torch.randn(7, 6, *kernel) * (torch.rand(7, 6, *kernel) < density)
            padding = [kernel[0] // 2, kernel[1] // 2]
            nodes = [conv_node("c", "x", "w", padding=padding), Node("r", "aten.relu.default", (Ref("c"),))]
            graph, x = make_graph(nodes, Ref("r"), {"w": weight}, (6, size, size)), torch.randn(33, 6, size, size)
            assert relative_error(graph, 2, isa, x, cut=0) < 1e-5
            fast = compile_graph(graph, isa=isa, cut=0)
            fast(x)
            convolutions = [program.steps[1] for program in fast.network.parts[0].programs.values()]
            framed += any(place.layout.fill is None for step in convolutions for place in step.inputs)
    assert framed or isa == "scalar"
