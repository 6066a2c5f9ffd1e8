"""Int8 convolutions and linear layers against the integer reference."""

import random
from collections import Counter
from itertools import product

import numpy as np
import pytest
import torch

from optg.deploy.compile import Compiled
from optg.deploy.engine.int8 import blocks, convolution
from optg.deploy.engine.int8.base import Places
from optg.deploy.engine.int8.blocks import in_blocks
from optg.deploy.engine.int8.taps import make_taps
from optg.deploy.graph import Graph, Ref, run_graph
from tests.deploy.engine import replay
from tests.deploy.engine.int8.graphs import INT8_ISAS, AnyTiling, Builder, check, check_against_torch, compile_int8
from tests.deploy.engine.int8.reference import multiply_add


def random_convolution(rng: random.Random) -> tuple[Graph, list[torch.Tensor], int]:
    """Return a graph, inputs and a number of threads: any kernel, stride, padding, dilation, groups, batch and density."""
    groups = rng.choice([1, 1, 1, 2, 3])
    inputs, outputs = (groups * rng.randint(1, 13) for _ in range(2))
    if rng.random() < 0.2:
        groups, outputs = inputs, inputs * rng.choice([1, 2])
    kernel = rng.choice([(1, 1), (3, 3), (3, 3), (5, 5), (7, 7), (2, 3), (1, 4)])
    dilation = rng.choice([(1, 1), (1, 1), (2, 2), (1, 3)])
    padding = rng.choice([(0, 0), (kernel[0] // 2, kernel[1] // 2), (kernel[0] - 1, kernel[1] // 2)])
    reach = [d * (k - 1) + 1 - 2 * p for d, k, p in zip(dilation, kernel, padding)]
    size = [max(1, r) + rng.choice([0, 1, 2, 3, 5, 6, 9, 13, 27]) for r in reach]
    stride = rng.choice([(1, 1), (1, 1), (2, 2), (3, 3), (2, 1)])
    batch = rng.choice([1, 1, 2, 3, 5, 8, 9])
    scale = rng.choice([0.0005, 0.004, 0.05])
    b = Builder((inputs, *size), seed=rng.randrange(10**6))
    x = b.input()
    weight = b.weight(outputs, inputs // groups, *kernel, density=rng.choice([0, 0.02, 0.1, 0.5, 1]), scale=scale)
    bias = b.bias(outputs) if rng.random() < 0.7 else None
    y = b.aten("conv2d", x, weight, bias, list(stride), list(padding), list(dilation), groups)
    out = [(n + 2 * p - d * (k - 1) - 1) // s + 1 for n, k, s, p, d in zip(size, kernel, stride, padding, dilation)]
    xs = [torch.randn(batch, inputs, *size, generator=b.draw) * 3]
    if rng.random() < 0.4:
        b.shapes = (*b.shapes, (outputs, *out))
        xs.append(torch.randn(batch, outputs, *out, generator=b.draw) * 3)
        y = b.aten("add.Tensor", *rng.sample([y, b.input(1)], 2))
    clamp = rng.choice([None, "relu", "relu6"])
    y = b.aten(clamp, y) if clamp else y
    if rng.random() < 0.2:
        return b.graph(y), xs, rng.choice([1, 2, 3])
    y = b.quantize(y, rng.uniform(0.01, 0.1), rng.choice([0, 0, rng.randrange(256)]))
    if rng.random() < 0.5:  # a second layer reads the padding of the first one's output
        weight = b.weight(3, outputs, 3, 3)
        b.quantize(b.aten("conv2d", y, weight, None, [1, 1], [1, 1]), 0.1, 77)
    return b.graph(), xs, rng.choice([1, 2, 3])


@pytest.mark.parametrize("isa", INT8_ISAS)
def test_random_convolutions_equal_the_reference(isa: str, poisoned_bytes: None) -> None:
    rng = random.Random(1)
    for _ in range(60):
        graph, xs, threads = random_convolution(rng)
        check(graph, *xs, threads=threads, isa=isa)


@pytest.fixture
def any_block(monkeypatch: pytest.MonkeyPatch) -> Counter[int]:
    """Let layers read blocks of any size, whatever their weights are. Count the sizes."""
    rng, seen = random.Random(4), Counter[int]()

    def choose(op: convolution.Convolution, places: Places) -> int:
        size = rng.choice(list(op.groups_by_block))
        seen[size] += 1
        return size

    monkeypatch.setattr(convolution, "block_size", choose)
    monkeypatch.setattr(convolution, "prefers_pixels", lambda op, places: False)
    return seen


@pytest.mark.parametrize("isa", INT8_ISAS)
def test_blocks_of_channels_equal_the_reference(isa: str, poisoned_bytes: None, any_block: Counter[int]) -> None:
    rng = random.Random(5)
    for _ in range(10 if isa in replay.TARGETS else 60):
        graph, xs, threads = random_convolution(rng)
        check(graph, *xs, threads=threads, isa=isa)
    assert set(any_block) == {1, 2, 4}


@pytest.mark.parametrize("size", [1, 2, 4])
def test_layers_read_blocks_of_the_size_that_their_zeros_come_in(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = []
    monkeypatch.setattr(
        convolution, "block_size", lambda op, places: chosen.append(blocks.block_size(op, places)) or chosen[-1]
    )
    b = Builder((64, 24, 24))
    weight = b.weight(64, 64, 3, 3, density=1)
    kept = torch.rand(64, 64 // size, 1, 3, 3, generator=b.draw) < 0.1
    b.tensors["w0"] *= kept.expand(-1, -1, size, -1, -1).reshape(64, 64, 3, 3)
    b.quantize(b.aten("conv2d", b.input(), weight, None, [1, 1], [1, 1]), 0.5, 9)
    check(b.graph(), torch.randn(1, 64, 24, 24))
    assert set(chosen) == {size}


@pytest.mark.long
@pytest.mark.parametrize("isa", INT8_ISAS)
def test_many_random_convolutions_equal_the_reference(isa: str, poisoned_bytes: None) -> None:
    rng = random.Random(2)
    for _ in range(150 if isa in replay.TARGETS else 1500):  # emulation is slow
        graph, xs, threads = random_convolution(rng)
        check(graph, *xs, threads=threads, isa=isa)


def test_convolutions_are_within_one_step_of_torch() -> None:
    rng = random.Random(3)
    for _ in range(30):
        graph, xs, _ = random_convolution(rng)
        first = Graph(**{**vars(graph), "outputs": graph.outputs[:1]})  # later layers start from other bytes
        check_against_torch(first, *xs)


@pytest.mark.parametrize("isa", INT8_ISAS)
@pytest.mark.parametrize("value", [0, 255])
def test_extreme_weights_and_inputs_are_exact(isa: str, value: int) -> None:
    """Sums of two products exceed 16 bits here: instructions that saturate would show."""
    b = Builder((64, 4, 4))
    x = b.quantize(Ref("x"), 1.0, 0, show=False)
    weight = b.weight(4, 64, 3, 3, density=1)
    signs = torch.tensor([127, -127, 127, -127]).reshape(4, 1, 1, 1)
    b.tensors["w0"] = (torch.ones(4, 64, 3, 3) * signs).to(torch.int8)
    b.tensors["w0"][2:, ::2] *= -1
    y = b.aten("conv2d", x, weight, None, [1, 1], [1, 1])
    b.quantize(y, 1e4, 128)
    check(b.graph(), torch.full((1, 64, 4, 4), float(value)), isa=isa)


@pytest.mark.parametrize("isa", INT8_ISAS)
@pytest.mark.parametrize("zero_point", [0, 128, 255])
def test_extreme_bytes_everywhere(isa: str, zero_point: int, poisoned_bytes: None) -> None:
    """Inputs and residuals are 0 or 255, weights -127, 0 or 127; results saturate, or end at the bounds of a clamp."""
    rng = random.Random(zero_point)
    for kernel, clamp, scale in product((1, 3), ("", "relu", "relu6"), (2.0, 3e4)):
        size = rng.choice([(1, 1), (4, 5), (9, 17)])
        b = Builder((9, *size), (6, *size), seed=kernel)
        x, r = (b.quantize(Ref(name), 1.0, point, show=False) for name, point in (("x", zero_point), ("y", 255 - zero_point)))
        weight = b.weight(6, 9, kernel, kernel, density=0.9, scale=1.0)
        b.tensors["w0"] = b.tensors["w0"].sign() * 127
        y = b.aten("add.Tensor", b.aten("conv2d", x, weight, None, [1, 1], [kernel // 2] * 2), r)
        b.quantize(b.aten(clamp, y) if clamp else y, scale, rng.choice([0, 100, 255]))
        extremes = [torch.randint(2, (2, channels, *size), generator=b.draw) * 1000.0 - 500 for channels in (9, 6)]
        check(b.graph(), *extremes, threads=2, isa=isa)


@pytest.mark.parametrize("isa", INT8_ISAS)
@pytest.mark.parametrize("features", [1, 7, 64, 100])
@pytest.mark.parametrize("batch", [1, 3, 64])
def test_linear_layers_equal_the_reference(features: int, batch: int, isa: str, poisoned_bytes: None) -> None:
    b = Builder((features,))
    y = b.quantize(b.aten("relu", b.aten("linear", b.input(), b.weight(33, features), b.bias(33))), 0.05, 3)
    logits = b.aten("linear", y, b.weight(10, 33, density=1), b.bias(10))
    check(b.graph(logits), torch.randn(batch, features), threads=2, isa=isa)


@pytest.mark.parametrize("isa", INT8_ISAS)
def test_a_linear_layer_reads_a_flattened_image(isa: str, poisoned_bytes: None) -> None:
    b = Builder((5, 3, 4))
    x = b.input(scale=0.03)
    flat = b.aten("flatten.using_ints", x, 1)
    b.quantize(b.aten("linear", flat, b.weight(6, 60), b.bias(6)), 0.04, 100)
    for batch in (1, 2, 9):
        check(b.graph(), torch.randn(batch, 5, 3, 4), isa=isa)


def test_a_linear_layer_on_the_columns_of_an_image_is_left_to_torch() -> None:
    b = Builder((1, 1, 1))  # one pixel: torch's result is an image of 4 columns, not one of 4 channels
    logits = b.aten("linear", b.input(), b.weight(4, 1, density=1.0))
    graph = b.graph(logits)
    for batch in (1, 2):
        x = torch.randn(batch, 1, 1, 1)
        for got, want in zip(Compiled(graph, 1, None, AnyTiling)(x), run_graph(graph, x), strict=True):
            torch.testing.assert_close(got, want)


def test_threads_and_batches_do_not_change_results() -> None:
    b = Builder((3, 9, 9))
    y = b.quantize(b.aten("conv2d", b.input(), b.weight(20, 3, 3, 3), None, [1, 1], [1, 1]), 0.03, 9)
    b.quantize(b.aten("conv2d", y, b.weight(30, 20, 3, 3), None, [2, 2], [1, 1]), 0.1, 200)
    graph, x = b.graph(), torch.randn(35, 3, 9, 9)
    expected = [compile_int8(graph)(x[i : i + 1]) for i in range(len(x))]
    for threads in (1, 2, 5):
        for got, *alone in zip(compile_int8(graph, threads)(x), *expected):
            assert torch.equal(got, torch.cat(alone))


@pytest.mark.parametrize("isa", INT8_ISAS)
def test_input_channels_are_taken_in_parts(isa: str, poisoned_bytes: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(convolution, "FIRST_CACHE", 2048)
    monkeypatch.setattr(convolution, "prefers_pixels", lambda op, places: False)
    monkeypatch.setattr(AnyTiling, "random", random.Random(0))  # the same tilings, whatever ran before
    b = Builder((100, 5, 6))
    y = b.quantize(b.aten("conv2d", b.input(), b.weight(7, 100, 3, 3, density=0.12), b.bias(7), [1, 1], [1, 1]), 0.6, 99)
    b.quantize(b.aten("conv2d", y, b.weight(3, 7, 3, 3), None, [1, 1], [1, 1]), 0.5, 9)
    AnyTiling.seen.clear()
    for _ in range(10):
        check(b.graph(), torch.randn(4, 100, 5, 6), threads=2, isa=isa)
    assert len({tiling.parts for tiling in AnyTiling.seen}) > 1


def test_threads_split_narrow_images_without_touching_each_other() -> None:
    """Images of 5 columns: a vector of a row reaches beyond the plane, which another thread may have written."""
    b = Builder((16, 24, 10))
    b.quantize(b.aten("conv2d", b.input(), b.weight(8, 16, 1, 1), None, [2, 2]), 0.1, 200)
    x = torch.randn(4, 16, 24, 10)
    for _ in range(20):
        check(b.graph(), x, threads=3)


@pytest.mark.parametrize(
    "change, reason",
    [
        ({"w0": torch.full((4, 3, 3, 3), -128, dtype=torch.int8)}, "a weight is -128"),
        ({"w0_scale": torch.tensor([1.0, 0.0, 1.0, 1.0])}, "not a positive number"),
        ({"w0_scale": torch.tensor([1.0, float("inf"), 1.0, 1.0])}, "not a positive number"),
    ],
)
def test_weights_outside_the_domain_run_in_float(change: dict[str, torch.Tensor], reason: str) -> None:
    b = Builder((3, 5, 5))
    b.quantize(b.aten("conv2d", b.input(), b.weight(4, 3, 3, 3)), 0.05, 3)
    b.tensors.update(change)
    from optg.deploy.compile import Compiled

    fast = Compiled(b.graph(), 1)
    assert any(reason in note for note in fast.notes)


def test_sums_that_may_overflow_run_in_float() -> None:
    b = Builder((70_000,))
    b.quantize(b.aten("linear", b.input(), b.weight(1, 70_000, density=1)), 0.5, 3)
    b.tensors["w0"] = torch.full((1, 70_000), 127, dtype=torch.int8)
    from optg.deploy.compile import Compiled

    assert any("may exceed 32 bits" in note for note in Compiled(b.graph(), 1).notes)


def test_taps_leave_out_zeros_and_share_offsets() -> None:
    weight = np.zeros((3, 8), np.int8)
    weight[0, [1, 5]], weight[2, :5] = 7, -3
    offsets = np.arange(8)[None] * 64
    taps = make_taps(weight[..., None], offsets, 1)
    assert taps.offset_unit == 8
    assert taps.bundles["groups"].tolist() == [[0, 1, 2]] and taps.bundles["channel"].tolist() == [[1, 0, 2]]
    assert taps.bundles["ends_short"].tolist() == [[0, 1, 1]]
    [table] = taps.arrays
    assert table["offsets"].tolist() == [[8, 40, 0, 0], [0, 8, 16, 24], [32, 0, 0, 0]]
    assert table["weights"].tolist() == [[7, 7, 0, 0], [-3, -3, -3, -3], [-3, 0, 0, 0]]
    wide = make_taps(weight[..., None], offsets, 2)
    assert wide.wide_count == 1 and wide.bundles["width"].tolist() == [[2, 1]]
    assert wide.arrays[0]["offsets"].tolist() == [[64, 320, 0, 0]]
    parts = make_taps(weight[..., None], offsets, 1, 2)
    assert parts.bases.tolist() == [0, 256] and parts.bundles["groups"].tolist() == [[0, 1, 1], [0, 1, 1]]
    assert parts.arrays[1]["offsets"].tolist() == [[8, 0, 0, 0], [0, 0, 0, 0]]


def test_taps_of_blocks() -> None:
    weight = np.arange(-12, 12, dtype=np.int8).reshape(1, 6, 2, 2)  # filters × channels × kernel
    weight[0, [0, 1], 1] = 0
    by_4 = in_blocks(weight, 4)
    assert by_4.tolist() == [
        [
            [-12, -8, -4, 0],
            [-11, -7, -3, 1],
            [0, 0, -2, 2],
            [0, 0, -1, 3],
            [4, 8, 0, 0],
            [5, 9, 0, 0],
            [6, 10, 0, 0],
            [7, 11, 0, 0],
        ]
    ]
    [table] = make_taps(by_4, np.arange(8)[None] * 100, 1).arrays
    assert table["offsets"].ravel().tolist() == [0, 100, 200, 300, 400, 500, 600, 700]
    assert table["weights"].tolist() == by_4[0].tolist()
    by_2 = in_blocks(weight, 2)
    [table] = make_taps(by_2, np.arange(12)[None] * 100, 1).arrays
    assert table["offsets"].tolist() == [[0, 100], [400, 500], [600, 700], [800, 900], [1000, 1100]]
    assert table["weights"].tolist()[0] == [-12, -8, -11, -7]


def test_the_reference_rounds_a_multiply_add_once() -> None:
    rng = np.random.default_rng(0)
    a, b, c = (
        rng.standard_normal(200_000).astype(np.float32) * np.float32(2.0) ** rng.integers(-12, 12, 200_000) for _ in range(3)
    )
    exact = (np.longdouble(a) * np.longdouble(b) + np.longdouble(c)).astype(np.float32)  # 64 bits hold almost all exactly
    assert (multiply_add(a, b, c) == exact).mean() > 0.9999
    tie = multiply_add(np.float32(1 + 2**-12), np.float32(1 + 2**-12), np.float32(2.0**-60))
    assert tie == np.float32(1 + 2**-11 + 2**-23)


@pytest.mark.parametrize("isa", INT8_ISAS)
@pytest.mark.parametrize("size", [(1, 1), (2, 2), (3, 4), (4, 4), (5, 5)])
def test_few_positions(size: tuple[int, int], isa: str, poisoned_bytes: None) -> None:
    for batch in (1, 2):
        for stride in (1, 2):
            b = Builder((40, *size), (40, *size))
            y = b.aten("add.Tensor", b.aten("conv2d", b.input(), b.weight(40, 40, 3, 3), None, [1, 1], [1, 1]), b.input(1))
            y = b.quantize(b.aten("relu", y), 0.2, 3)
            y = b.aten("relu", b.aten("conv2d", y, b.weight(9, 40, 3, 3), b.bias(9), [stride, stride], [1, 1]))
            for _ in range(2):
                check(b.graph(y), torch.randn(batch, 40, *size), torch.randn(batch, 40, *size), threads=2, isa=isa)


def test_a_residual_is_overwritten_only_if_nothing_needs_it_later() -> None:
    for needed in (True, False):
        b = Builder((8, 6, 6), (8, 6, 6))
        r = b.quantize(Ref("y"), 0.03, 60, show=needed)
        b.quantize(b.aten("add.Tensor", b.aten("conv2d", b.input(), b.weight(8, 8, 1, 1)), r), 0.05, 90)
        graph, x, y = b.graph(), torch.randn(2, 8, 6, 6), torch.randn(2, 8, 6, 6)
        check(graph, x, y)
        fast = compile_int8(graph)
        fast(x, y)
        [program] = fast.network.parts[0].programs.values()
        [call] = [call for call in program.steps if call.in_place is not None]
        assert (call.output.overwrites is call.in_place) is not needed
