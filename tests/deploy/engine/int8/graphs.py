"""Quantized graphs, and a comparison of the engine with the integer reference, bit by bit."""

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from optg.deploy.compile import Compiled
from optg.deploy.engine.int8.segment import Int8Segment
from optg.deploy.engine.tune import Tuner
from optg.deploy.graph import Graph, Node, Ref, run_graph
from optg.deploy.graph.int8 import DEQUANTIZE, QUANTIZE, WEIGHT
from tests.deploy.engine import replay
from tests.deploy.engine.harness import FLAGS, ISAS, make_graph
from tests.deploy.engine.int8 import reference

INT8_ISAS = [
    *ISAS,
    "native",
    pytest.param(
        "avx_vnni", marks=pytest.mark.skipif("avx_vnni" not in FLAGS, reason="this CPU has no AVX-VNNI, like many with AVX2")
    ),
    *replay.parameters(*(name for name in replay.TARGETS if name != "neon")),
]


class AnyTiling(Tuner):
    """Chooses any tiling, not the fastest, and remembers nothing."""

    random = random.Random(0)
    seen: set[Any] = set()  # noqa: RUF012

    def choose(self, layer: Any, arena: int) -> Any:
        tiling = self.random.choice(layer.tilings())
        self.seen.add(tiling)
        layer.fill(tiling)
        return tiling

    def save(self) -> None:
        pass


class Builder:
    """Adds nodes to a graph. Every quantized value is also an output, dequantized."""

    def __init__(self, *shapes: tuple[int, ...], seed: int = 0) -> None:
        self.shapes = shapes
        self.nodes: list[Node] = []
        self.tensors: dict[str, Tensor] = {}
        self.outputs: list[Ref] = []
        self.random = random.Random(seed)
        self.draw = torch.Generator().manual_seed(seed)

    def add(self, op: str, *args: Any) -> Ref:
        name = f"n{len(self.nodes)}"
        self.nodes.append(Node(name, op, args))
        return Ref(name)

    def aten(self, op: str, *args: Any) -> Ref:
        return self.add(f"aten.{op}" if "." in op else f"aten.{op}.default", *args)

    def quantize(self, x: Ref, scale: float, zero_point: int, show: bool = True) -> Ref:
        """Quantize and dequantize a value."""
        q = self.add(QUANTIZE, x, scale, zero_point)
        if show:
            self.outputs.append(self.add(DEQUANTIZE, q, scale, zero_point))
        return self.add(DEQUANTIZE, q, scale, zero_point)

    def input(self, number: int = 0, scale: float | None = None) -> Ref:
        return self.quantize(
            Ref("xy"[number]), scale or self.random.uniform(0.01, 0.05), self.random.randrange(256), show=False
        )

    def weight(self, *shape: int, density: float = 0.3, scale: float = 0.01) -> Ref:
        name = f"w{len(self.tensors)}"
        values = torch.randint(-127, 128, shape, generator=self.draw)
        values *= torch.rand(shape, generator=self.draw) < density
        self.tensors[name] = values.to(torch.int8)
        self.tensors[f"{name}_scale"] = scale * (0.5 + torch.rand(shape[0], generator=self.draw))
        return self.add(WEIGHT, Ref(name), Ref(f"{name}_scale"))

    def bias(self, count: int) -> Ref:
        name = f"b{len(self.tensors)}"
        self.tensors[name] = torch.randn(count, generator=self.draw)
        return Ref(name)

    def graph(self, *outputs: Ref) -> Graph:
        return make_graph(self.nodes, [*self.outputs, *outputs], self.tensors, *self.shapes)


def compile_int8(graph: Graph, threads: int = 1, isa: str | None = None) -> Compiled:
    fast = Compiled(graph, threads, isa, AnyTiling)
    assert not fast.notes, fast.notes
    assert [type(part) for part in fast.network.parts] == [Int8Segment]
    return fast


def check(graph: Graph, *inputs: Tensor, threads: int = 1, isa: str | None = None) -> None:
    """Compare with the integer reference bit by bit, and with torch's run of the graph."""
    fast = compile_int8(graph, threads, isa)
    [segment] = fast.network.parts
    assert isinstance(segment, Int8Segment)
    expected = reference.run_segment(segment, dict(zip(graph.inputs, (x.numpy() for x in inputs))))
    for ref, got in zip(graph.outputs, fast(*inputs), strict=True):
        want = torch.from_numpy(expected[ref.name]).reshape(got.shape)
        assert torch.equal(got, want), f"{ref.name}: {(got != want).sum()} of {got.numel()} numbers differ"


def check_against_torch(graph: Graph, *inputs: Tensor, steps: float = 1.0) -> None:
    """Compare each quantized value with torch's run of the same graph: at most one step apart."""
    fast = compile_int8(graph)
    scales = {node.name: node.args[1] for node in graph.nodes if node.op == DEQUANTIZE}
    for ref, got, want in zip(graph.outputs, fast(*inputs), run_graph(graph, *inputs), strict=True):
        limit = steps * scales[ref.name] if ref.name in scales else 1e-4 * np.abs(want.numpy()).max()
        assert (got - want).abs().max() <= 1.0001 * limit, ref.name


def small_int8_net() -> Graph:
    """Return a net with every operation: strided and depthwise layers, a shortcut, poolings, a table, a concat, a head."""
    b = Builder((3, 13, 11), seed=5)
    x = b.quantize(b.aten("relu", b.aten("conv2d", b.input(), b.weight(8, 3, 3, 3), b.bias(8), [1, 1], [1, 1])), 0.05, 0)
    y = b.quantize(b.aten("conv2d", x, b.weight(8, 1, 3, 3), None, [1, 1], [1, 1], [1, 1], 8), 0.05, 90)
    y = b.quantize(b.aten("add.Tensor", b.quantize(b.aten("hardswish", y), 0.04, 20), x), 0.08, 10)
    y = b.quantize(b.aten("max_pool2d", y, [3, 3], [2, 2], [1, 1]), 0.08, 10)
    z = b.quantize(b.aten("relu", b.aten("conv2d", x, b.weight(6, 8, 3, 3), b.bias(6), [2, 2], [1, 1])), 0.06, 0)
    z = b.quantize(b.aten("cat", [y, z], 1), 0.09, 5)
    pooled = b.quantize(b.aten("avg_pool2d", z, [2, 2], [2, 2], [1, 1]), 0.05, 7)
    mean = b.quantize(b.aten("flatten.using_ints", b.aten("adaptive_avg_pool2d", z, [1, 1]), 1), 0.03, 0)
    b.quantize(b.aten("linear", b.aten("flatten.using_ints", pooled, 1), b.weight(5, 14 * 4 * 4)), 0.1, 128)
    return b.graph(b.aten("linear", mean, b.weight(10, 14), b.bias(10)))
