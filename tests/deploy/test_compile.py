"""optg.compile on whole nets, and as its users meet it."""

import contextlib
import copy
import os
import pickle
import signal
import warnings
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import optg
from optg.deploy.bench import prune_at_random, settle_norms
from optg.deploy.engine import build, tune
from tests.deploy.nets import SHAPES, Odd, sparse


def exactly(model: nn.Module, x: Tensor) -> Tensor:
    """The model in float64; it is left in float32."""
    try:
        with torch.no_grad():
            return model.double()(x.double())
    finally:
        model.float()


def error(got: Tensor, exact: Tensor) -> float:
    return ((got - exact).abs().max() / exact.abs().max()).item()


@pytest.mark.parametrize(
    ("name", "sparsity"),
    [("digits", 0.9), ("vgg19", 0.98), ("resnet50", 0.95), ("mobilenet_v1", 0.9), ("digits", 0.0)],
)
def test_whole_nets(name: str, sparsity: float) -> None:
    model = sparse(name, sparsity)
    torch.manual_seed(0)
    x = torch.randn(17, *SHAPES[name])
    exact = exactly(model, x)
    fast = optg.compile(model, x[:1], threads=2)
    assert not fast.notes
    for batch in (1, 17):
        got = fast(x[:batch])
        assert error(got, exact[:batch]) < 1e-4
        assert torch.equal(got.argmax(1), exact[:batch].argmax(1))


@pytest.mark.parametrize("name", ["resnet20", "vit_ti-cifar"])
def test_what_the_engine_does_not_know_runs_in_torch(name: str) -> None:
    """ResNet-20's shortcuts slice and pad; a ViT is attention."""
    model = sparse(name, 0.9)
    x = torch.randn(3, *SHAPES[name])
    fast = optg.compile(model, x)
    assert fast.notes
    assert error(fast(x), exactly(model, x)) < 1e-5
    assert error(fast(x[:1]), exactly(model, x[:1])) < 1e-5


@pytest.fixture(scope="module")
def torchvision() -> Iterator[ModuleType]:
    """Its models. Operations that its compiled part defines are missing beside a CPU build of torch: two are declared here."""
    if not find_spec("torchvision"):
        pytest.skip("torchvision is not installed")
    with contextlib.suppress(RuntimeError):  # they are there
        library = torch.library.Library("torchvision", "DEF")
        for missing in ("nms", "qnms"):
            library.define(f"{missing}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    yield import_module("torchvision.models")


@pytest.mark.parametrize("name", ["efficientnet_b0", "densenet121", "shufflenet_v2_x1_0"])
def test_nets_of_torchvision(name: str, torchvision: ModuleType, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = getattr(torchvision, name)(), torch.randn(3, 3, 64, 64)
    prune_at_random(model, 0.9)
    settle_norms(model, x.shape[1:])
    exact = exactly(model.eval(), x)
    assert error(optg.compile(model, x[:1], threads=2)(x), exact) < 1e-4
    optg.save(model, tmp_path / "model.optg", x)
    assert error(optg.compile(optg.load(tmp_path / "model.optg"), x)(x), exact) < 1e-4


def test_many_outputs_and_odd_parts() -> None:
    torch.manual_seed(0)
    model, x = Odd().eval(), torch.randn(4, 3, 8, 8)
    fast = optg.compile(model, x)
    with torch.no_grad():
        wanted = model(x.clone())
    got = fast(x)
    assert got["more"][1] == 8
    torch.testing.assert_close(got["logits"], wanted["logits"], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(got["more"][0], wanted["more"][0], rtol=1e-5, atol=1e-5)


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(2, 4, 3, padding="same"), nn.Conv2d(2, 4, 1)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        z = F.relu(self.a(x) + self.b(y))
        return z, z.flatten(1), x


def test_two_inputs_and_an_output_that_is_one() -> None:
    torch.manual_seed(0)
    model, x, y = TwoInputs(), torch.randn(3, 2, 6, 5), torch.randn(3, 2, 6, 5)
    z, flat, same = optg.compile(model, (x, y))(x, y)
    assert torch.equal(optg.compile(model, {"y": y, "x": x})(x=x, y=y)[0], z)
    with pytest.raises(ValueError, match="unknown input w; expected x, y"):
        optg.compile(model, (x, y))(x, w=y)
    torch.testing.assert_close(z, model(x, y)[0].detach(), rtol=1e-5, atol=1e-6)
    assert torch.equal(flat, z.flatten(1)) and torch.equal(same, x)


class Made(nn.Module):
    """A model of one function, around a convolution."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.c, self.l, self.function = nn.Conv2d(3, 8, 1), nn.Linear(8, 5), function

    def forward(self, x: Tensor) -> Any:
        return self.function(self, x)


ODD = {
    "one thing for one image": lambda m, x: m.c(x) if x.shape[0] == 1 else m.c(x) * 2,
    "another for many": lambda m, x: m.c(x) if x.shape[0] > 4 else m.c(x) * 2,
    "a batch that may be squeezed away": lambda m, x: m.l(F.adaptive_avg_pool2d(m.c(x), 1).squeeze()).relu(),
    "sizes that change places": lambda m, x: m.l(m.c(x).mean((2, 3))).t().relu(),
    "channels that change places": lambda m, x: F.relu(m.c(x).permute(1, 0, 2, 3)),
    "two shapes of the same numbers": lambda m, x: (y := m.c(x).mean((2, 3), keepdim=True)) + y.flatten(1),
    "a bound that is a tensor": lambda m, x: torch.clamp_min(m.c(x), m.c.bias[:, None, None]),
    "a factor that is a size": lambda m, x: torch.add(m.c(x), m.c(x), alpha=x.shape[0]),
    "places of maxima": lambda m, x: F.adaptive_max_pool2d(m.c(x), 2, return_indices=True),
    "the input": lambda m, x: x.clone(),
    "one value twice": lambda m, x: (y := m.c(x), y.clone()),
    "a weight": lambda m, x: (m.c(x), m.c.bias.clone()),
}


@pytest.mark.parametrize("batch", [1, 2, 5])
@pytest.mark.parametrize("name", ODD)
def test_odd_models_do_what_they_do_in_torch(name: str, batch: int) -> None:
    """Captured with one batch, called with others; what the engine cannot know runs in torch, or is refused."""
    model = Made(ODD[name]).eval()
    fast = optg.compile(model, torch.randn(batch, 3, 8, 8))
    for other in (batch, 1, 2, 5, 8):
        x = torch.randn(other, 3, 8, 8)
        before = x.clone()
        with torch.no_grad():
            expected = model(x)
        try:
            got = fast(x)
        except ValueError as error:
            assert "expected" in str(error) and other != batch
            continue
        got, expected = (value if isinstance(value, tuple) else (value,) for value in (got, expected))
        for a, b in zip(got, expected, strict=True):
            assert a.shape == b.shape and torch.allclose(a.float(), b.float(), atol=1e-5)
        for value in got:  # nobody else's memory
            value.zero_()
        again = fast(before)
        again = again if isinstance(again, tuple) else (again,)
        assert x.equal(before) and all(torch.allclose(a.float(), b.float(), atol=1e-5) for a, b in zip(again, expected))


def test_inputs_by_name_and_place(tmp_path: Path) -> None:
    class Two(nn.Module):
        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            return torch.relu(a) - b

    a, b = torch.randn(2, 3, 8, 8), torch.randn(2, 3, 8, 8)
    optg.save(Two(), tmp_path / "two.optg", {"b": b, "a": a})
    for fast in (optg.compile(Two(), {"b": b, "a": a}), optg.load(tmp_path / "two.optg")):
        for got in (fast(a, b), fast(b=b, a=a), fast(a, b=b)):
            assert got.equal(Two()(a, b))
        for few in (a[:1], a[:0]):
            with pytest.raises(ValueError, match=r"the inputs have batches of \d and 2; expected one size for all"):
                fast(few, b)
        with pytest.raises(ValueError, match=r"the input b is of type ndarray; expected a tensor"):
            fast(a, b.numpy())


def test_the_batch_is_that_of_images_where_a_number_comes_first() -> None:
    class Scaled(nn.Module):
        def forward(self, scale: Tensor, x: Tensor) -> Tensor:
            return torch.relu(x) * scale

    scale, x = torch.tensor(2.0), torch.randn(5, 3, 4, 4)
    fast = optg.compile(Scaled(), (scale, x[:2]))
    for batch in (1, 2, 5):
        assert fast(scale, x[:batch]).equal(Scaled()(scale, x[:batch]))
    assert not any("run in torch" in note for note in fast.notes)


def test_numbers_that_are_none() -> None:
    x = torch.randn(2, 3, 8, 8)
    x[0, 0, 0, 0] = x[1, 2, 7, 7] = float("nan")
    for pool in (nn.MaxPool2d(2), nn.MaxPool2d(3, 1, 1), nn.AdaptiveMaxPool2d(1)):
        assert torch.equal(optg.compile(pool, x)(x).isnan(), pool(x).isnan())
    x = torch.tensor([-1e38, -1e4, -101.0, -99.0, -88.0, -20.0, 0.0, 1e38]).reshape(1, 8, 1, 1)
    assert torch.allclose(optg.compile(nn.SiLU(), x)(x), nn.SiLU()(x), rtol=1e-5, atol=1e-35)


def test_a_copy_is_refused_and_a_child_process_goes_on() -> None:
    fast = optg.compile(nn.Conv2d(2, 3, 3), x := torch.randn(1, 2, 5, 5))
    for copying in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="a compiled model cannot be copied or pickled"):
            copying(fast)
    with fast.lock:  # as if another thread were inside a call
        child = os.fork()
        if child == 0:
            signal.alarm(20)
            os._exit(0 if fast(x).shape == (1, 3, 3, 3) else 1)
    assert os.waitpid(child, 0)[1] == 0


@pytest.mark.parametrize("content", [b"", b"\x7fELF and no more"])
def test_a_damaged_engine_is_compiled_again(content: bytes, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(build, "cache", lambda: tmp_path)
    build._library.cache_clear()
    try:
        build.library("scalar")
        [path] = tmp_path.glob("engine-*.so")
        path.unlink()
        path.write_bytes(content)
        build._library.cache_clear()
        assert build.library("scalar").lanes == 1
    finally:
        build._library.cache_clear()


def test_remembered_tiles_that_are_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    library = build.library()
    monkeypatch.setattr(tune, "cache", lambda: tmp_path)
    for content in ("[]", "null", "3", "{"):
        (tmp_path / f"tiles-{library.key.removeprefix('engine-')}.json").write_text(content)
        assert tune.Tuner(library).known == {}


def test_weights_are_those_of_the_moment_of_compiling() -> None:
    model, x = nn.Conv2d(2, 3, 3), torch.randn(1, 2, 5, 5)
    fast = optg.compile(model, x)
    before = fast(x)
    nn.init.zeros_(model.weight)
    assert torch.equal(fast(x), before) and model.training
    assert optg.compile(model, x)(x).std(dim=(2, 3)).max() == 0


def test_batches_of_any_size_and_memory_of_any_order() -> None:
    torch.manual_seed(0)
    model = nn.Conv2d(3, 4, 3)
    x = torch.randn(7, 3, 9, 9)
    fast = optg.compile(model, x[:2])
    assert fast(x[:0]).shape == (0, 4, 7, 7)
    exact = exactly(model, x)
    assert error(fast(x), exact) < 1e-5
    assert error(fast(x.to(memory_format=torch.channels_last)), exact) < 1e-5
    assert error(fast(x.flip(3).flip(3)[::2]), exact[::2]) < 1e-5


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (torch.zeros(1, 3, 8, 8), "the input input is 1×3×8×8; expected any×2×5×5"),
        (torch.zeros(1, 2, 5, 5, dtype=torch.float64), "is torch.float64 on cpu; the engine takes torch.float32 on cpu"),
    ],
)
def test_wrong_inputs(x: Tensor, message: str) -> None:
    fast = optg.compile(nn.Conv2d(2, 3, 3), torch.randn(1, 2, 5, 5))
    with pytest.raises(ValueError, match=message):
        fast(x)


def test_wrong_arguments() -> None:
    model, x = nn.Conv2d(2, 3, 3), torch.randn(1, 2, 5, 5)
    for threads in (0, 2.5):
        with pytest.raises(ValueError, match=f"threads is {threads}; expected a whole number of at least 1"):
            optg.compile(model, x, threads=threads)
    with pytest.raises(ValueError, match="unknown instruction set 'sse9'; expected one of native"):
        optg.compile(model, x, isa="sse9")
    with pytest.raises(ValueError, match=r"is of torch.float64; the engine takes torch.float32"):
        optg.compile(model.double(), x.double())


def test_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "/nowhere/cc")
    build._library.cache_clear()
    try:
        model, x = nn.Conv2d(2, 3, 3), torch.randn(1, 2, 5, 5)
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            fast = optg.compile(model, x)
            assert torch.equal(fast(x), model(x))
            assert torch.equal(fast(x), model(x))
        assert [str(w.message).startswith("optg.compile falls back to torch") for w in seen] == [True]
        assert "everything runs in torch" in repr(fast)
    finally:
        build._library.cache_clear()


def test_a_compiler_that_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    compiler = tmp_path / "cc"
    compiler.write_text("#!/bin/sh\n[ \"$1\" = --version ] && exit 0\necho 'no such thing' >&2\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CC", str(compiler))
    build._library.cache_clear()
    try:
        with pytest.raises(build.NoCompiler, match="does not compile the engine: no such thing"):
            build.library()
    finally:
        build._library.cache_clear()


def test_threads_do_not_share_what_is_little() -> None:
    for name, expected in (("digits", False), ("vgg19", True)):
        model, x = sparse(name, 0.9), torch.randn(1, *SHAPES[name])
        fast = optg.compile(model, x, threads=2)
        fast(x)
        (program,) = fast.parts[0].programs.values()
        assert program.shared == expected


def test_the_table_says_how_each_layer_runs() -> None:
    model = sparse("digits", 0.9)
    x = torch.randn(1, *SHAPES["digits"])
    text = repr(optg.compile(model, x))
    assert " 3×3 + relu" in text and "linear" not in text and "100.0%" in text
