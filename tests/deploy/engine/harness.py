"""Compare the engine with torch in float64, with tiles chosen at random so that every kernel is used."""

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from optg.deploy.compile import Compiled
from optg.deploy.engine import build
from optg.deploy.engine.ops.tiles import Layer
from optg.deploy.engine.tune import Tuner
from optg.deploy.graph import Graph, Node, Ref, run_graph
from tests.deploy.engine import replay

FLAGS = build.cpu_flags().split()
ISAS = [
    pytest.param("avx512", marks=pytest.mark.skipif("avx512vl" not in FLAGS, reason="this CPU has no AVX-512")),
    pytest.param("avx2", marks=pytest.mark.skipif("avx2" not in FLAGS, reason="this CPU has no AVX2")),
    "scalar",
    *replay.parameters("neon"),
]


def make_graph(nodes: list[Node], outputs: Any, tensors: dict[str, Tensor], *shapes: tuple[int, ...]) -> Graph:
    """Return a graph whose inputs x and y have these shapes, and any batch size."""
    names = ["x", "y"][: len(shapes)]
    free = [(None, *shape) for shape in shapes]
    kinds = dict.fromkeys(tensors, "parameter")
    return Graph(names, free, [torch.float32] * len(names), nodes, outputs, tensors, kinds)  # type: ignore[arg-type]


def one_op(op: str, arguments: tuple[Any, ...], shape: tuple[int, ...]) -> Graph:
    """Return a graph of one operation on x, named like conv2d or softmax.int."""
    name, _, overload = op.partition(".")
    return make_graph([Node("n", f"aten.{name}.{overload or 'default'}", (Ref("x"), *arguments))], Ref("n"), {}, shape)


class RandomTuner(Tuner):
    """Chooses any tiling, not the fastest, and remembers nothing."""

    random = random.Random(0)
    parts: set[int] = set()  # noqa: RUF012
    fixed_cut: int | None = None

    def choose(self, layer: Layer, arena: int) -> Any:
        tiling = self.random.choice(layer.candidates())._replace(outside=self.random.random() < 0.5)
        self.parts.add(tiling.parts)
        layer.fill(tiling)
        return tiling

    def known_cut(self, segment: Any, images: int) -> int | None:
        known = super().known_cut(segment, images)
        return known if self.fixed_cut is None else min(self.fixed_cut, len(segment.ops))

    def save(self) -> None:
        pass


def compile_graph(
    graph: Graph, threads: int = 1, isa: str | None = None, cut: int | None = None, tuner: type[RandomTuner] = RandomTuner
) -> Compiled:
    def make_tuner(library: build.Library) -> RandomTuner:
        made = tuner(library)
        made.fixed_cut = cut
        return made

    return Compiled(graph, threads, isa, make_tuner)


def relative_error(graph: Graph, threads: int, isa: str, *inputs: Tensor, cut: int | None = None) -> float:
    """Return the largest error, relative to the largest value."""
    fast = compile_graph(graph, threads, isa, cut)
    assert not fast.notes, fast.notes
    got = fast(*inputs)
    exact = run_graph(graph, *(x.double() for x in inputs), tensors={n: t.double() for n, t in graph.tensors.items()})
    assert got.shape == exact.shape and got.dtype == torch.float32
    assert not got.isnan().any()
    return ((got - exact).abs().max() / exact.abs().max().clamp_min(1e-3)).item() if got.numel() else 0.0


BATCHES_AND_SIZES = ((1, (12, 12)), (1, (15, 8)), (3, (3, 4)), (17, (9, 8)), (33, (6, 8)))


def check_ops(operations: list[tuple[str, tuple[Any, ...]]], isa: str) -> None:
    """Compare single operations with torch, for several batches and image sizes."""
    torch.manual_seed(2)
    for batch, size in BATCHES_AND_SIZES:
        x = 3 * torch.randn(batch, 5, *size)
        for op, arguments in operations:
            if (op, arguments) == ("adaptive_avg_pool2d", ([3, 4],)) and (size[0] % 3 or size[1] % 4):
                continue
            assert relative_error(one_op(op, arguments, x.shape[1:]), 2, isa, x) < 1e-5, (op, arguments, x.shape)


def check_two_inputs(nodes: list[Node], isa: str) -> None:
    torch.manual_seed(3)
    for batch in (1, 5, 16):
        x, y = torch.randn(batch, 4, 7, 9), torch.randn(batch, 4, 7, 9)
        for node in nodes:
            graph = make_graph([node], Ref("n"), {}, x.shape[1:], y.shape[1:])
            assert relative_error(graph, 3, isa, x, y) < 1e-5, node


def conv_node(name: str, x: str, weight: str, stride: Any = 1, padding: Any = 0, bias: Any = None) -> Node:
    sizes = [list(value) if isinstance(value, (list, tuple)) else [value, value] for value in (stride, padding)]
    return Node(name, "aten.conv2d.default", (Ref(x), Ref(weight), bias, *sizes, [1, 1], 1))


def small_net() -> Graph:
    """Return a net that moves values about: a padded stem, a strided branch and its shortcut, a concat, a head over 3 × 3."""
    torch.manual_seed(4)

    def weight(*shape: int) -> Tensor:
        return torch.randn(*shape) * (torch.rand(*shape) < 0.3)

    tensors = {
        "w0": weight(8, 3, 3, 3), "w1": weight(12, 8, 1, 1), "w2": weight(12, 12, 3, 3), "w3": weight(12, 8, 1, 1),
        "w4": weight(6, 24, 1, 1), "w5": weight(10, 6 * 9), "b5": torch.randn(10),
        "m": torch.rand(12), "v": torch.rand(12) + 0.5, "g": torch.randn(12), "h": torch.randn(12),
    }  # fmt: skip
    norm = (Ref("g"), Ref("h"), Ref("m"), Ref("v"), False, 0.1, 1e-5, True)
    nodes = [
        conv_node("stem", "x", "w0", 1, 1), Node("relu", "aten.relu.default", (Ref("stem"),)),
        conv_node("a", "relu", "w1"), Node("a_norm", "aten.batch_norm.default", (Ref("a"), *norm)),
        Node("a_relu", "aten.relu.default", (Ref("a_norm"),)), conv_node("b", "a_relu", "w2", 2, 1),
        conv_node("c", "relu", "w3", 2), Node("sum", "aten.add.Tensor", (Ref("b"), Ref("c"))),
        Node("sum_norm", "aten.batch_norm.default", (Ref("sum"), *norm)),
        Node("cat", "aten.cat.default", ([Ref("sum_norm"), Ref("c")], 1)),
        Node("pool", "aten.max_pool2d.default", (Ref("cat"), [3, 3], [2, 2], [1, 1])), conv_node("d", "pool", "w4"),
        Node("flat", "aten.flatten.using_ints", (Ref("d"), 1)),
        Node("fc", "aten.linear.default", (Ref("flat"), Ref("w5"), Ref("b5"))),
    ]  # fmt: skip
    return make_graph(nodes, Ref("fc"), tensors, (3, 11, 11))


def random_convolution(rng: random.Random) -> tuple[Graph, tuple[Tensor, ...], int, int | None]:
    """Return a graph, inputs, threads and a cut: any kernel, stride, padding, dilation, groups, batch and sparsity.

    Some have a residual and an activation.
    """
    groups = rng.choice([1, 1, 1, 2, 3])
    inputs, outputs = (groups * rng.randint(1, 9) for _ in range(2))
    if rng.random() < 0.2:
        groups = inputs
        outputs = inputs * rng.choice([1, 2])
    kernel = rng.choice([(1, 1), (3, 3), (3, 3), (5, 5), (7, 7), (2, 3), (1, 4)])
    dilation = rng.choice([(1, 1), (1, 1), (2, 2), (1, 3)])
    padding = rng.choice([(0, 0), (kernel[0] // 2, kernel[1] // 2), (kernel[0] - 1, kernel[1] // 2)])
    reach = [d * (k - 1) + 1 - 2 * p for d, k, p in zip(dilation, kernel, padding)]
    size = [max(1, r) + rng.choice([0, 1, 2, 3, 5, 6, 9, 13, 27]) for r in reach]
    stride = rng.choice([(1, 1), (1, 1), (2, 2), (3, 3), (2, 1)])
    batch = rng.choice([1, 1, 1, 2, 3, 8, 9, 16, 17, 33])
    weight = torch.randn(outputs, inputs // groups, *kernel)
    weight *= torch.rand_like(weight) >= rng.choice([0, 0.5, 0.9, 0.99, 1])
    weight[rng.randrange(outputs)] = 0
    tensors = {"w": weight, "b": torch.randn(outputs)}
    bias = Ref("b") if rng.random() < 0.7 else None
    nodes = [Node("c", "aten.conv2d.default", (Ref("x"), Ref("w"), bias, stride, padding, dilation, groups))]
    xs = [torch.randn(batch, inputs, *size)]
    shape = run_graph(make_graph(nodes, Ref("c"), tensors, xs[0].shape[1:]), xs[0]).shape
    if rng.random() < 0.4:
        xs.append(torch.randn(shape))
        nodes.append(Node("s", "aten.add.Tensor", (Ref(nodes[-1].name), Ref("y"))))
    if rng.random() < 0.5:
        act = rng.choice(["relu", "relu6", "hardswish", "sigmoid", "silu", "leaky_relu", "tanh", "hardsigmoid"])
        nodes.append(Node("r", f"aten.{act}.default", (Ref(nodes[-1].name),)))
    cut = rng.choice([None, 0, 1])
    graph = make_graph(nodes, Ref(nodes[-1].name), tensors, *(x.shape[1:] for x in xs))
    return graph, tuple(xs), rng.choice([1, 2, 3, 8]), cut
