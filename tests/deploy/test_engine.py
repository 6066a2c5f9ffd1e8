"""The engine's operations against torch in float64: grids of shapes, every tile, any number of threads, each ISA."""

import ctypes
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from optg.deploy import compile as compile_module
from optg.deploy.compile import Compiled
from optg.deploy.engine import build, plan, structs, tune
from optg.deploy.engine.layout import Grid, Halo, Layout, best_grid
from optg.deploy.engine.tune import Layer, Tiling, Tuner
from optg.deploy.graph import Graph, Node, Ref, run

FLAGS = build.cpu_flags().split()
ISAS = [
    pytest.param("avx512", marks=pytest.mark.skipif("avx512vl" not in FLAGS, reason="no AVX-512 here")),
    pytest.param("avx2", marks=pytest.mark.skipif("avx2" not in FLAGS, reason="no AVX2 here")),
    "scalar",
]


def graph(nodes: list[Node], outputs: Any, tensors: dict[str, Tensor], *shapes: tuple[int, ...]) -> Graph:
    names = ["x", "y"][: len(shapes)]
    free = [(None, *shape) for shape in shapes]
    kinds = dict.fromkeys(tensors, "parameter")
    return Graph(names, free, [torch.float32] * len(names), nodes, outputs, tensors, kinds)  # type: ignore[arg-type]


class Any_tile(Tuner):
    """Takes some tile, not the fastest, so that every kernel gets its turn; and remembers nothing."""

    random = random.Random(0)
    used: set[tuple[Any, ...]] = set()  # noqa: RUF012
    parts: set[int] = set()  # noqa: RUF012

    def choose(self, layer: Layer, arena: int) -> Any:
        tiling = self.random.choice(layer.candidates())._replace(outside=self.random.random() < 0.5)
        self.used.add((*tiling[:3], layer.stride[1]))
        self.parts.add(tiling.parts)
        layer.fill(tiling)
        return tiling

    def save(self) -> None:
        pass


@pytest.fixture(autouse=True)
def shared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads share even the smallest work."""
    monkeypatch.setattr(plan, "SHARED", -1)


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Memory that is not written before it is read is NaN."""
    workspace, empty = Compiled.workspace, torch.empty

    def nan_workspace(self: Compiled, size: int, number: int) -> Any:
        pointers = workspace(self, size, number)
        for _, address in self.arenas:
            ctypes.memset(address, 0xFF, self.arena_size)
        return pointers

    monkeypatch.setattr(Compiled, "workspace", nan_workspace)
    monkeypatch.setattr(compile_module.torch, "empty", lambda *shape, **k: empty(*shape, **k).fill_(float("nan")))
    yield


def compiled(graph: Graph, threads: int = 1, isa: str | None = None, cut: int | None = None) -> Compiled:
    made = Compiled(graph, threads, isa)
    made.tuner = Any_tile(made.library)
    if cut is not None:
        made.tuner.known_cut = lambda segment, images: min(cut, len(segment.ops))
    return made


def difference(graph: Graph, threads: int, isa: str, *inputs: Tensor, cut: int | None = None) -> float:
    """The largest error, relative to the largest value."""
    fast = compiled(graph, threads, isa, cut)
    assert not fast.notes, fast.notes
    got = fast(*inputs)
    exact = run(graph, *(x.double() for x in inputs), tensors={n: t.double() for n, t in graph.tensors.items()})
    assert got.shape == exact.shape and got.dtype == torch.float32
    assert not got.isnan().any()
    return ((got - exact).abs().max() / exact.abs().max().clamp_min(1e-3)).item() if got.numel() else 0.0


def random_convolution(rng: random.Random) -> tuple[Graph, tuple[Tensor, ...], int, int | None]:
    """Any kernel, stride, padding, dilation, groups, batch and sparsity; maybe with a residual and an activation."""
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
    shape = run(graph(nodes, Ref("c"), tensors, xs[0].shape[1:]), xs[0]).shape
    if rng.random() < 0.4:
        xs.append(torch.randn(shape))
        nodes.append(Node("s", "aten.add.Tensor", (Ref(nodes[-1].name), Ref("y"))))
    if rng.random() < 0.5:
        act = rng.choice(["relu", "relu6", "hardswish", "sigmoid", "silu", "leaky_relu", "tanh", "hardsigmoid"])
        nodes.append(Node("r", f"aten.{act}.default", (Ref(nodes[-1].name),)))
    cut = rng.choice([None, 0, 1])
    return graph(nodes, Ref(nodes[-1].name), tensors, *(x.shape[1:] for x in xs)), tuple(xs), rng.choice([1, 2, 3, 8]), cut


@pytest.mark.parametrize("isa", ISAS)
def test_convolutions(isa: str, poisoned: None, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(1)
    torch.manual_seed(1)
    monkeypatch.setattr(tune, "FEWEST", 0.1)
    Any_tile.parts.clear()
    for case in range(120):
        made, inputs, threads, cut = random_convolution(rng)
        monkeypatch.setattr(tune, "PARTS", rng.choice([(45e3,), (1000, 300, 50)]))
        error = difference(made, threads, isa, *inputs, cut=cut)
        assert error < 1e-5, (case, error, made.nodes, [x.shape for x in inputs])
    assert len(Any_tile.parts) > 2


OPERATIONS: dict[str, tuple[Any, ...]] = {
    "max_pool2d": ([3, 3], [2, 2], [1, 1]),
    "max_pool2d ": ([2, 2], [2, 2]),
    "max_pool2d  ": ([3, 2], [2, 3], [1, 0], [2, 1], True),
    "avg_pool2d": ([3, 3], [2, 2], [1, 1]),
    "avg_pool2d ": ([2, 2],),
    "avg_pool2d  ": ([3, 3], [2, 2], [1, 1], True, False),
    "avg_pool2d   ": ([3, 3], [2, 2], [1, 1], True, True),
    "avg_pool2d    ": ([2, 3], [1, 2], [0, 1], False, True, 5),
    "adaptive_avg_pool2d": ([1, 1],),
    "adaptive_avg_pool2d ": ([3, 4],),
    "relu": (), "relu6": (), "hardswish": (), "hardsigmoid": (), "sigmoid": (), "silu": (), "tanh": (), "leaky_relu": (0.2,),
    "hardtanh": (-0.5, 0.25), "clamp": (None, 0.3), "clamp_min": (0.1,),
    "softmax.int": (1,), "_softmax": (-3, False), "mean.dim": ([2, 3], True), "mean.dim ": ([-1, -2],),
    "flatten.using_ints": (1,),
}  # fmt: skip


@pytest.mark.parametrize("isa", ISAS)
def test_operations(isa: str, poisoned: None) -> None:
    torch.manual_seed(2)
    for batch, size in ((1, (12, 12)), (1, (15, 8)), (3, (3, 4)), (17, (9, 8)), (33, (6, 8))):
        x = 3 * torch.randn(batch, 5, *size)
        for name, arguments in OPERATIONS.items():
            op, _, overload = name.strip().partition(".")
            if (op, arguments) == ("adaptive_avg_pool2d", ([3, 4],)) and (size[0] % 3 or size[1] % 4):
                continue
            made = graph([Node("n", f"aten.{op}.{overload or 'default'}", (Ref("x"), *arguments))], Ref("n"), {}, x.shape[1:])
            assert difference(made, 2, isa, x) < 1e-5, (name, x.shape)


@pytest.mark.parametrize("isa", ISAS)
def test_two_inputs(isa: str, poisoned: None) -> None:
    torch.manual_seed(3)
    for batch in (1, 5, 16):
        x, y = torch.randn(batch, 4, 7, 9), torch.randn(batch, 4, 7, 9)
        for node in (
            Node("n", "aten.add.Tensor", (Ref("x"), Ref("y")), {"alpha": 0.5}),
            Node("n", "aten.add.Tensor", (Ref("x"), Ref("x"))),
            Node("n", "aten.mul.Tensor", (Ref("x"), Ref("y"))),
            Node("n", "aten.cat.default", ([Ref("x"), Ref("y"), Ref("x")], 1)),
        ):
            assert difference(graph([node], Ref("n"), {}, x.shape[1:], y.shape[1:]), 3, isa, x, y) < 1e-5, node


def small_net() -> Graph:
    """Everything that moves values about: a stem with padding, a strided branch and its shortcut, concat, a head over 3 × 3."""
    torch.manual_seed(4)

    def weight(*shape: int) -> Tensor:
        return torch.randn(*shape) * (torch.rand(*shape) < 0.3)

    tensors = {
        "w0": weight(8, 3, 3, 3), "w1": weight(12, 8, 1, 1), "w2": weight(12, 12, 3, 3), "w3": weight(12, 8, 1, 1),
        "w4": weight(6, 24, 1, 1), "w5": weight(10, 6 * 9), "b5": torch.randn(10),
        "m": torch.rand(12), "v": torch.rand(12) + 0.5, "g": torch.randn(12), "h": torch.randn(12),
    }  # fmt: skip

    def conv(name: str, x: str, w: str, stride: int = 1, padding: int = 0) -> Node:
        return Node(name, "aten.conv2d.default", (Ref(x), Ref(w), None, [stride, stride], [padding, padding], [1, 1], 1))

    norm = (Ref("g"), Ref("h"), Ref("m"), Ref("v"), False, 0.1, 1e-5, True)
    nodes = [
        conv("stem", "x", "w0", 1, 1), Node("relu", "aten.relu.default", (Ref("stem"),)),
        conv("a", "relu", "w1"), Node("a_norm", "aten.batch_norm.default", (Ref("a"), *norm)),
        Node("a_relu", "aten.relu.default", (Ref("a_norm"),)), conv("b", "a_relu", "w2", 2, 1), conv("c", "relu", "w3", 2),
        Node("sum", "aten.add.Tensor", (Ref("b"), Ref("c"))), Node("sum_norm", "aten.batch_norm.default", (Ref("sum"), *norm)),
        Node("cat", "aten.cat.default", ([Ref("sum_norm"), Ref("c")], 1)),
        Node("pool", "aten.max_pool2d.default", (Ref("cat"), [3, 3], [2, 2], [1, 1])), conv("d", "pool", "w4"),
        Node("flat", "aten.flatten.using_ints", (Ref("d"), 1)),
        Node("fc", "aten.linear.default", (Ref("flat"), Ref("w5"), Ref("b5"))),
    ]  # fmt: skip
    return graph(nodes, Ref("fc"), tensors, (3, 11, 11))


def test_the_same_bits_for_any_number_of_threads(poisoned: None) -> None:
    made = small_net()
    for batch in (1, 3, 16, 33):
        x = torch.randn(batch, 3, 11, 11)
        for cut in (0, 2, 6, 10):
            results = []
            for threads in range(1, 9):
                Any_tile.random = random.Random(cut)
                results.append(compiled(made, threads, cut=cut)(x))
            assert all(torch.equal(result, results[0]) for result in results)


@pytest.mark.parametrize("isa", ISAS)
def test_a_net_cut_anywhere(isa: str, poisoned: None) -> None:
    """In groups of as many images as there are lanes, of one, and of half as many, which have two lanes each."""
    made = small_net()
    for batch, cut in product((33, 24, 12, 2), range(11)):
        assert difference(made, 1, isa, torch.randn(batch, 3, 11, 11), cut=cut) < 1e-5, (batch, cut)


@pytest.mark.parametrize("isa", ISAS)
def test_two_windows_on_one_value(isa: str, poisoned: None) -> None:
    """One leaves out the padding, the other wants some of it, less than the first would."""
    torch.manual_seed(7)
    for first, second, batch in product([(3, 3), (1, 3), (3, 1)], [(1, 3), (3, 1), (3, 3)], (1, 8, 16)):
        weights = {"v": torch.randn(6, 6, *first) * (torch.rand(6, 6, *first) < 0.1), "w": torch.randn(6, 6, *second)}
        nodes = [
            Node(name, "aten.conv2d.default", (Ref("x"), Ref(w), None, [1, 1], [k // 2 for k in size], [1, 1], 1))
            for name, w, size in (("a", "v", first), ("b", "w", second))
        ]
        nodes.append(Node("s", "aten.add.Tensor", (Ref("a"), Ref("b"))))
        made = graph(nodes, Ref("s"), weights, (6, 4, 4))
        assert difference(made, 1, isa, torch.randn(batch, 6, 4, 4), cut=0) < 1e-5, (first, second, batch)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("op", ["aten.mean.dim", "aten.relu.default", "aten.softmax.int", "aten.add.Tensor"])
def test_some_pixels_for_one_and_all_for_another(op: str, isa: str, poisoned: None) -> None:
    """A convolution that skips pixels has a place of its own, which is no model for others."""
    torch.manual_seed(9)
    args = {"aten.mean.dim": ([2, 3], True), "aten.softmax.int": (1,), "aten.add.Tensor": (Ref("x"),)}.get(op, ())
    for size, stride, batch in product([(2, 8), (9, 7)], (2, 3), (1, 3, 16)):
        nodes = [
            Node("c", "aten.conv2d.default", (Ref("x"), Ref("w"), None, [stride, stride], [0, 0], [1, 1], 1)),
            Node("o", op, (Ref("x"), *args)),
        ]
        made = graph(nodes, (Ref("c"), Ref("o")), {"w": torch.randn(4, 4, 1, 1)}, (4, *size))
        x = torch.randn(batch, 4, *size)
        for got, exact in zip(compiled(made, isa=isa, cut=0)(x), run(made, x), strict=True):
            assert torch.allclose(got, exact, atol=1e-5), (size, stride, batch)


@pytest.mark.parametrize("padding", [(1, 0), (0, 1), (1, 1)])
def test_one_pixel_and_padding_in_every_tile(padding: tuple[int, int]) -> None:
    torch.manual_seed(8)
    node = Node("c", "aten.conv2d.default", (Ref("x"), Ref("w"), None, [1, 1], list(padding), [1, 1], 1))
    weight = torch.randn(8, 3, 1, 1)
    for size, batch in product([(8, 8), (8, 4), (3, 5)], (1, 16)):
        made, x = graph([node], Ref("c"), {"w": weight}, (3, *size)), torch.randn(batch, 3, *size)
        exact = torch.nn.functional.conv2d(x.double(), weight.double(), padding=padding)
        tried = 0
        while True:
            fast, count = compiled(made), 0

            def choose(layer: Layer, arena: int, i: int = tried) -> Any:
                nonlocal count
                tilings = layer.candidates()
                count = len(tilings)
                layer.fill(tilings[i])
                return tilings[i]

            fast.tuner.choose = choose
            fast.tuner.known_cut = lambda segment, images: 0
            assert (fast(x) - exact).abs().max() < 1e-5, (size, batch, tried)
            tried += 1
            if tried == count:
                break


def test_every_kernel_had_its_turn() -> None:
    """A square of tiles on a layer as large as the largest kernel."""
    library = build.library()
    used: set[Any] = set()
    torch.manual_seed(5)
    for stride, size in ((1, 36), (2, 36), (3, 40)):
        weight = torch.randn(8, 2, 3, 3) * (torch.rand(8, 2, 3, 3) < 0.5)
        node = Node("c", "aten.conv2d.default", (Ref("x"), Ref("w"), None, [stride, stride], [1, 1], [1, 1], 1))
        made, x = graph([node], Ref("c"), {"w": weight}, (2, size, size)), torch.randn(16, 2, size, size)
        exact = run(made, x.double(), tensors={"w": weight.double()})
        for kernel in library.kernels:
            if kernel.framed or kernel.stride not in (stride, 0):
                continue
            fast = compiled(made)

            def choose(layer: Layer, arena: int, k: Any = kernel) -> Any:
                tiling = Tiling(*k[:3])
                used.update([k] if layer.possible(tiling) else [])
                return layer.fill(tiling if layer.possible(tiling) else Tiling(1, 1, 1))

            fast.tuner.choose = choose
            fast.tuner.known_cut = lambda segment, images: 0
            assert (fast(x) - exact).abs().max() < 1e-5 * exact.abs().max(), kernel
    assert used == {kernel for kernel in library.kernels if not kernel.framed}


@pytest.mark.parametrize("isa", ISAS)
def test_small_images_without_their_padding(isa: str, poisoned: None) -> None:
    """Side by side, with kernels that make a whole image and leave out what taps see beyond it."""
    torch.manual_seed(6)
    framed = 0
    for size in range(1, 7):
        for kernel, density in (((3, 3), 0.2), ((3, 1), 0.2), ((1, 3), 0.0), ((3, 3), 0.9)):
            weight = torch.randn(7, 6, *kernel) * (torch.rand(7, 6, *kernel) < density)
            padding = [kernel[0] // 2, kernel[1] // 2]
            nodes = [
                Node("c", "aten.conv2d.default", (Ref("x"), Ref("w"), None, [1, 1], padding, [1, 1], 1)),
                Node("r", "aten.relu.default", (Ref("c"),)),
            ]
            made, x = graph(nodes, Ref("r"), {"w": weight}, (6, size, size)), torch.randn(33, 6, size, size)
            assert difference(made, 2, isa, x, cut=0) < 1e-5
            fast = compiled(made, isa=isa, cut=0)
            fast(x)
            framed += any(place.layout.fill is None for p in fast.parts[0].programs.values() for place in p.touched[1][1:])
    assert framed or isa == "scalar"


def test_halos_by_eye() -> None:
    """A 3 × 4 image in two lanes, left and right; its halo of one column repeats the neighbour's edge."""
    layout = Layout(1, 3, 4, Grid(1, 1, 2), 3, 2, 2, Halo(0, 0, 1, 1), 0.0)
    assert layout.pixels.tolist() == [[[0, 2], [1, 3]], [[4, 6], [5, 7]], [[8, 10], [9, 11]]]
    edges, masks = layout.edges
    table = {tuple(edge[:2].tolist()): masks[edge[2]].tolist() for edge in edges[:2]}
    # Before the first column: the second, one lane earlier, for the right block only. After the last: the first, one later.
    assert table == {(-8, 8 - 4): [0, -1], (16, 0 + 4): [-1, 0]}


def test_grids_of_fewest_vectors() -> None:
    assert best_grid(56, 56, 1, 16) == Grid(1, 4, 4)
    assert best_grid(7, 7, 1, 16)[0] == 1
    assert best_grid(7, 7, 16, 16) == Grid(16, 1, 1)
    assert best_grid(1, 1, 1, 16) == Grid(1, 1, 1)


def exact_arena(size: int) -> tuple[Any, int]:
    """Memory that ends where it should, so that a sanitizer sees what reads beyond."""
    return structs.aligned(size)


KERNELS = "TO_4(K,1,1,1) TO_3(K,1,2,1) TO_3(K,1,1,2) TO_2(K,1,1,0) TO_2(K,2,1,1) TO_2(K,2,2,1) TO_2(K,4,1,1)"
SANITIZED = ("-DLANES=4", "-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all", f"-DKERNELS(K)={KERNELS}")


def sanitized() -> None:
    """Run by the test below, in a process where the sanitizers watch."""
    structs.arena = exact_arena
    rng = random.Random(6)
    torch.manual_seed(6)
    for _ in range(40):
        made, inputs, threads, cut = random_convolution(rng)
        assert difference(made, threads, "scalar", *inputs, cut=cut) < 1e-5
    for batch in (1, 9):
        assert difference(small_net(), 2, "scalar", torch.randn(batch, 3, 11, 11), cut=6) < 1e-5
    for name, arguments in OPERATIONS.items():
        op, _, overload = name.strip().partition(".")
        made = graph([Node("n", f"aten.{op}.{overload or 'default'}", (Ref("x"), *arguments))], Ref("n"), {}, (5, 12, 12))
        assert difference(made, 2, "scalar", torch.randn(9, 5, 12, 12)) < 1e-5
    print("clean")


def test_sanitizers_are_silent(tmp_path: Path) -> None:
    """Addresses and undefined behaviour, with vectors of four lanes."""
    names = [["cc", f"-print-file-name={name}"] for name in ("libasan.so", "libubsan.so")]
    runtime = [subprocess.run(command, capture_output=True, text=True).stdout.strip() for command in names]
    if not all(map(os.path.isabs, runtime)):
        pytest.skip("no sanitizers here")
    program = (
        "from optg.deploy.engine import build\n"
        f"build.ISAS['scalar'] = {SANITIZED}\n"
        "from tests.deploy.test_engine import sanitized\n"
        "sanitized()\n"
    )
    environment = {**os.environ, "LD_PRELOAD": " ".join(runtime), "ASAN_OPTIONS": "detect_leaks=0", "OMP_NUM_THREADS": "1"}
    environment["OPTG_CACHE"] = str(tmp_path)
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", program], cwd=root, env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.endswith("clean\n"), done.stderr[-3000:]
