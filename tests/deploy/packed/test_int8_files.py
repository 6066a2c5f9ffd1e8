"""int8 in packed files: written, read back, run, and refused if anything about the numbers is wrong."""

import copy
import json
import math
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import optg
from optg.deploy.graph import GraphError, Node, Ref, run_graph
from optg.deploy.graph.int8 import DEQUANTIZE, QUANTIZE, WEIGHT
from optg.deploy.packed import PackedError, pack, unpack
from tests.deploy.engine.int8.graphs import Builder, small_int8_net
from tests.deploy.nets import SHAPES, sparse
from tests.deploy.packed.examples import ABOUT
from tests.deploy.packed.test_damaged_files import join, split
from tests.deploy.packed.test_forged_files import forged


@cache
def small_int8_file() -> bytes:
    return pack(small_int8_net(), ABOUT)


@pytest.mark.parametrize("name, kept", [("digits", []), ("resnet20", ["conv1"])])
def test_quantized_model_is_saved_and_runs_as_before(name: str, kept: list[str], tmp_path: Path) -> None:
    torch.manual_seed(0)
    x, path = torch.randn(3, *SHAPES[name]), tmp_path / "model.optg"
    quantized = optg.quantize(sparse(name, 0.9), [torch.randn(4, *SHAPES[name])], keep_float=kept)
    size = optg.save(quantized, path, x[:1])
    assert size == path.stat().st_size and b"quantized_decomposed" not in path.read_bytes()
    loaded = optg.load(path)
    state = {key: value for key, value in quantized.state_dict().items() if not key.endswith("_zero_point")}
    assert loaded.state_dict().keys() == state.keys()
    assert all(torch.equal(value, state[key]) for key, value in loaded.state_dict().items())
    with torch.no_grad():
        torch.testing.assert_close(loaded(x), quantized(x))  # torch runs it
    fast = optg.compile(loaded, x[:1])
    assert torch.equal(fast(x), optg.compile(quantized, x[:1])(x)) and "int8 sparse" in repr(fast)
    zeros = sum(int((value == 0).sum()) for value in state.values() if value.dtype == torch.int8)
    account = loaded.about.account
    assert account["parameters"] - account["nonzero"] >= zeros > 0 and 0 < account["flops"] < 0.3 * account["dense_flops"]


def test_size_of_a_sparse_file(tmp_path: Path) -> None:
    """At 98 % zeros a value takes a byte and its position 7.1 bits: about 1 % of float32, and the names of layers."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(1024, 1000), nn.ReLU(), nn.Linear(1000, 200))
    with torch.no_grad():
        for layer in (model[1], model[3]):
            layer.weight *= torch.rand_like(layer.weight) < 0.02
    size = optg.save(optg.quantize(model, [torch.randn(4, 1024)]), tmp_path / "model.optg", torch.zeros(1, 1024))
    assert size < 0.0125 * sum(4 * p.numel() for p in model.parameters())


class Named(nn.Module):
    """Returns a dict, and looks up the rows of a table by indices."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.table = nn.Conv2d(1, 4, 3), nn.Embedding(7, 4)

    def forward(self, x: Tensor, index: Tensor) -> dict[str, Tensor]:
        y = self.conv(x).relu()
        return {"image": y, "logits": y.mean((2, 3)) + self.table(index)}


def test_outputs_are_plain_dicts_and_indices_are_checked(tmp_path: Path) -> None:
    x, index = torch.randn(2, 1, 5, 5), torch.tensor([3, 6])
    quantized = optg.quantize(Named(), [(x, index)])
    optg.save(quantized, tmp_path / "model.optg", (x, index))
    loaded = optg.load(tmp_path / "model.optg")
    found = loaded(x, index)
    assert type(found) is dict and list(found) == ["image", "logits"]
    torch.testing.assert_close(found, quantized(x, index))
    for wrong in (7, -1, 2**40):
        with pytest.raises(GraphError, match=r"\(aten.embedding.default\) failed: .*index out of range"):
            loaded(x, torch.tensor([0, wrong]))


def test_quantizations_that_a_file_cannot_hold_are_refused(tmp_path: Path) -> None:
    with pytest.raises(GraphError, match=r"quantized_decomposed.quantize_per_tensor.default .* a packed file cannot hold"):
        b = Builder((3, 5, 5))
        b.add("quantized_decomposed.quantize_per_tensor.default", Ref("x"), 0.1, 3, -128, 127, torch.int8)
        pack(b.graph(Ref("n0")), ABOUT)
    node = Node("n", "quantized_decomposed.quantize_per_tensor.default", (Ref("x"), 0.1, 3, 0, 255, torch.uint8))
    with pytest.raises(GraphError, match=r"'quantized_decomposed.quantize_per_tensor.default' is not permitted"):
        unpack(forged([node], Ref("n")))


# ---- forged files


def arguments_of(header: Any, op: str) -> Any:
    return next(node[2] for node in header["graph"]["nodes"] if node[1] == op)


@pytest.mark.parametrize("op", [QUANTIZE, DEQUANTIZE])
@pytest.mark.parametrize(
    "at, value, message",
    [
        *((1, value, "scale is .*; expected a number from 9.1e-13 to 1.1e\\+12") for value in
          (0.0, -0.5, 1e-13, 1e13, 1, True, None, "1", [0.5], {"float": "nan"}, {"float": "inf"})),
        *((2, value, "zero_point is .*; expected an integer from 0 to 255") for value in (-1, 256, 0.0, True, None)),
        (0, 3, "input is 3; expected a tensor of (float32|uint8)"),
    ],
)  # fmt: skip
def test_forged_scale_or_zero_point_is_refused(op: str, at: int, value: Any, message: str) -> None:
    header, body = split(small_int8_file())
    arguments_of(header, op)[at] = value
    assert_refused(join(header, body), message)


def assert_refused(content: bytes, message: str) -> None:
    with pytest.raises((PackedError, GraphError), match=message) as caught:
        unpack(content)
    assert "\n" not in str(caught.value)


def test_forged_arguments_are_refused() -> None:
    def refuse(modify: Callable[[Any], object], message: str) -> None:
        header, body = split(small_int8_file())
        modify(header)
        assert_refused(join(header, body), message)

    refuse(lambda h: arguments_of(h, QUANTIZE).__setitem__(0, {"ref": "w0"}), "input is a 4-dimensional tensor of torch.int8")
    refuse(lambda h: arguments_of(h, DEQUANTIZE).__setitem__(0, {"ref": "x"}), "input is .* torch.float32; expected .* uint8")
    refuse(lambda h: arguments_of(h, WEIGHT).__setitem__(0, {"ref": "x"}), "weight is .* torch.float32; expected .* int8")
    refuse(lambda h: arguments_of(h, WEIGHT).pop(), r"optg.dequantize_s8.default\) failed")
    refuse(lambda h: arguments_of(h, WEIGHT).append(1), "got 3 arguments; expected at most 2")
    refuse(lambda h: arguments_of(h, QUANTIZE).append(1), "got 4 arguments; expected at most 3")
    refuse(lambda h: arguments_of(h, WEIGHT).__setitem__(1, arguments_of(h, WEIGHT)[0]), "scale is .* torch.int8")


@pytest.mark.parametrize(
    "change, message",
    [
        ({"w0": torch.full((8, 3, 3, 3), -128, dtype=torch.int8)}, "a weight is below -127"),
        ({"w0_scale": torch.tensor([1.0, math.nan, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0])}, "a scale of its weights is not a number"),
        ({"w0_scale": torch.zeros(8)}, "a scale of its weights is not a number"),
        ({"w0_scale": torch.ones(7)}, r"optg.dequantize_s8.default\) failed"),
    ],
)
def test_forged_weights_are_refused(change: dict[str, Tensor], message: str) -> None:
    assert_refused(pack(changed(change), ABOUT), message)


def changed(tensors: dict[str, Tensor]) -> Any:
    graph = copy.copy(small_int8_net())
    graph.tensors = {**graph.tensors, **tensors}
    return graph


def test_sums_of_more_than_32_bits_are_refused() -> None:
    b = Builder((70_000,))
    b.quantize(b.aten("linear", b.input(), b.weight(1, 70_000, density=1)), 0.5, 3)
    b.tensors["w0"] = torch.full((1, 70_000), 127, dtype=torch.int8)
    assert_refused(pack(b.graph(), ABOUT), "a sum of its products may reach .* more than 32 bits hold")


def test_named_arguments_run_the_same() -> None:
    """A file may give arguments by name; the engine has to find them."""
    header, body = split(small_int8_file())
    for node in header["graph"]["nodes"]:
        names = {WEIGHT: ["weight", "scale"]}.get(node[1], ["input", "scale", "zero_point"])
        if node[1].startswith("optg."):
            node[2:] = [], dict(zip(names, node[2]))
    model, x = unpack(join(header, body)), torch.randn(2, 3, 13, 11)
    assert "{}" not in json.dumps([node[3] for node in header["graph"]["nodes"] if node[1].startswith("optg.")])
    fast, plain = (optg.compile(each, x) for each in (model, unpack(small_int8_file())))
    assert all(map(torch.equal, fast(x), plain(x))) and not fast.notes


def test_computing_with_bytes_gives_what_torch_gives() -> None:
    """No quantizer writes this, but a file may: operations on bytes that are not dequantized, or dequantized otherwise."""
    b = Builder((3, 4, 4))
    q = b.add(QUANTIZE, Ref("x"), 0.05, 100)
    half = b.add(DEQUANTIZE, q, 0.025, 0)
    flipped = b.aten("flip", q, [1])
    clamped = b.aten("clamp", q, 90, 110)
    again = b.add(QUANTIZE, b.aten("flatten.using_ints", b.add(DEQUANTIZE, q, 0.05, 100), 1), 0.05, 100)
    total = b.aten("add.Tensor", q, q)
    graph = unpack(pack(b.graph(half, flipped, clamped, again, total, q), ABOUT))
    x = torch.randn(2, 3, 4, 4)
    for got, want in zip(optg.compile(graph, x)(x), run_graph(graph.graph, x)):
        assert got.dtype == want.dtype and torch.equal(got, want)
