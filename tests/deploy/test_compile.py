"""optg.compile on whole nets, and its behaviour for users."""

import copy
import os
import pickle
import signal
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor, nn
from torch.nn import functional as F

import optg
from optg.deploy.bench import prune_at_random, settle_norms
from optg.deploy.engine import build
from tests.deploy.nets import SHAPES, Odd, sparse


def run_in_float64(model: nn.Module, x: Tensor) -> Tensor:
    """Run the model in float64; leave it in float32."""
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
def test_whole_nets_agree_with_torch(name: str, sparsity: float) -> None:
    model = sparse(name, sparsity)
    torch.manual_seed(0)
    x = torch.randn(17, *SHAPES[name])
    exact = run_in_float64(model, x)
    fast = optg.compile(model, x[:1], threads=2)
    assert not fast.notes
    for batch in (1, 17):
        got = fast(x[:batch])
        assert error(got, exact[:batch]) < 1e-4
        assert torch.equal(got.argmax(1), exact[:batch].argmax(1))


@pytest.mark.parametrize("name", ["resnet20", "vit_ti-cifar"])
def test_unsupported_operations_run_in_torch(name: str) -> None:
    """ResNet-20 slices and pads in its shortcuts; a ViT uses attention."""
    model = sparse(name, 0.9)
    x = torch.randn(3, *SHAPES[name])
    fast = optg.compile(model, x)
    assert fast.notes
    assert error(fast(x), run_in_float64(model, x)) < 1e-5
    assert error(fast(x[:1]), run_in_float64(model, x[:1])) < 1e-5


@pytest.mark.parametrize(
    "name", [*(pytest.param(name, marks=pytest.mark.long) for name in ("efficientnet_b0", "densenet121")), "shufflenet_v2_x1_0"]
)
def test_torchvision_models(name: str, torchvision: ModuleType, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = getattr(torchvision, name)(), torch.randn(3, 3, 64, 64)
    prune_at_random(model, 0.9)
    settle_norms(model, x.shape[1:])
    exact = run_in_float64(model.eval(), x)
    assert error(optg.compile(model, x[:1], threads=2)(x), exact) < 1e-4
    optg.save(model, tmp_path / "model.optg", x)
    assert error(optg.compile(optg.load(tmp_path / "model.optg"), x)(x), exact) < 1e-4


def test_several_outputs_and_unsupported_parts() -> None:
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


def test_two_inputs_and_an_output_that_is_an_input() -> None:
    torch.manual_seed(0)
    model, x, y = TwoInputs(), torch.randn(3, 2, 6, 5), torch.randn(3, 2, 6, 5)
    z, flat, same = optg.compile(model, (x, y))(x, y)
    assert torch.equal(optg.compile(model, {"y": y, "x": x})(x=x, y=y)[0], z)
    with pytest.raises(ValueError, match="unknown input w; expected x, y"):
        optg.compile(model, (x, y))(x, w=y)
    torch.testing.assert_close(z, model(x, y)[0].detach(), rtol=1e-5, atol=1e-6)
    assert torch.equal(flat, z.flatten(1)) and torch.equal(same, x)


class OneFunction(nn.Module):
    """A model with a convolution and a linear layer, whose forward is a given function."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.c, self.l, self.function = nn.Conv2d(3, 8, 1), nn.Linear(8, 5), function

    def forward(self, x: Tensor) -> Any:
        return self.function(self, x)


UNUSUAL = {
    "a special case for one image": lambda m, x: m.c(x) if x.shape[0] == 1 else m.c(x) * 2,
    "a special case for many": lambda m, x: m.c(x) if x.shape[0] > 4 else m.c(x) * 2,
    "squeeze may remove the batch": lambda m, x: m.l(F.adaptive_avg_pool2d(m.c(x), 1).squeeze()).relu(),
    "transpose": lambda m, x: m.l(m.c(x).mean((2, 3))).t().relu(),
    "permute": lambda m, x: F.relu(m.c(x).permute(1, 0, 2, 3)),
    "two shapes of one value": lambda m, x: (y := m.c(x).mean((2, 3), keepdim=True)) + y.flatten(1),
    "a clamp by a tensor": lambda m, x: torch.clamp_min(m.c(x), m.c.bias[:, None, None]),
    "a factor that is the batch size": lambda m, x: torch.add(m.c(x), m.c(x), alpha=x.shape[0]),
    "indices of maxima": lambda m, x: F.adaptive_max_pool2d(m.c(x), 2, return_indices=True),
    "returns its input": lambda m, x: x.clone(),
    "returns one value twice": lambda m, x: (y := m.c(x), y.clone()),
    "returns a weight": lambda m, x: (m.c(x), m.c.bias.clone()),
}


@pytest.mark.parametrize("batch", [1, 2, 5])
@pytest.mark.parametrize("name", UNUSUAL)
def test_unusual_models_behave_as_in_torch(name: str, batch: int) -> None:
    """Capture with one batch size and call with others. What the engine cannot handle runs in torch or raises an error."""
    model = OneFunction(UNUSUAL[name]).eval()
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
        for value in got:  # outputs must not share memory with anything
            value.zero_()
        again = fast(before)
        again = again if isinstance(again, tuple) else (again,)
        assert x.equal(before) and all(torch.allclose(a.float(), b.float(), atol=1e-5) for a, b in zip(again, expected))


def test_inputs_by_name_and_by_position(tmp_path: Path) -> None:
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


def test_batch_size_comes_from_images_when_a_scalar_comes_first() -> None:
    class Scaled(nn.Module):
        def forward(self, scale: Tensor, x: Tensor) -> Tensor:
            return torch.relu(x) * scale

    scale, x = torch.tensor(2.0), torch.randn(5, 3, 4, 4)
    fast = optg.compile(Scaled(), (scale, x[:2]))
    for batch in (1, 2, 5):
        assert fast(scale, x[:batch]).equal(Scaled()(scale, x[:batch]))
    assert not any("ran in torch" in note for note in fast.notes)


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("batch", [1, 3, 16])
def test_zero_weight_does_not_hide_nan_or_infinity(number: float, batch: int) -> None:
    """torch multiplies NaN and infinity by 0, which is NaN; the engine would skip the product."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 16, 10)).eval()
    with torch.no_grad():
        for layer in (model[0], model[3]):
            layer.weight *= torch.rand_like(layer.weight) < 0.05
    x = torch.randn(batch, 3, 6, 6)
    fast = optg.compile(model, x)
    assert not fast.notes
    for at in ((0, 0, 0, 0), (batch - 1, 2, 5, 5), (0, 1, 3, 2)):
        y = x.clone()
        y[at] = number
        assert torch.equal(fast(y).isnan(), model(y).isnan()) and model(y).isnan().any()
    assert fast.notes == [f"a batch of {batch} ran in torch: input holds NaN or infinite numbers"]
    assert torch.allclose(fast(x), model(x), atol=1e-5)


@pytest.mark.parametrize(
    ("layer", "name", "number"), [(0, "weight", float("nan")), (0, "bias", float("inf")), (1, "running_var", -1.0)]
)
def test_weights_with_nan_run_in_torch(layer: int, name: str, number: float) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(8 * 16, 10)).eval()
    x = torch.randn(2, 3, 6, 6)
    with torch.no_grad():
        model[3].weight *= torch.rand(10, 8 * 16) < 0.01
        getattr(model[layer], name).view(-1)[0] = number
        assert torch.equal(optg.compile(model, x)(x).isnan(), model(x).isnan()) and model(x).isnan().any()


def test_infinity_from_torch_between_two_parts_of_the_engine() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.second(torch.log(torch.relu(self.first(x))))

    model, x = Net().eval(), torch.randn(5, 8)
    with torch.no_grad():
        model.second.weight *= torch.eye(8)
        assert torch.equal(optg.compile(model, x)(x).isnan(), model(x).isnan()) and model(x).isnan().any()


def test_empty_values_run_in_torch() -> None:
    model, x = nn.AdaptiveAvgPool2d((0, 0)), torch.randn(2, 3, 4, 4)
    assert optg.compile(model, x)(x).shape == (2, 3, 0, 0)


def test_nan_and_large_numbers_pass_through_as_in_torch() -> None:
    x = torch.randn(2, 3, 8, 8)
    x[0, 0, 0, 0] = x[1, 2, 7, 7] = float("nan")
    for pool in (nn.MaxPool2d(2), nn.MaxPool2d(3, 1, 1), nn.AdaptiveMaxPool2d(1)):
        assert torch.equal(optg.compile(pool, x)(x).isnan(), pool(x).isnan())
    x = torch.tensor([-1e38, -1e4, -101.0, -99.0, -88.0, -20.0, 0.0, 1e38]).reshape(1, 8, 1, 1)
    assert torch.allclose(optg.compile(nn.SiLU(), x)(x), nn.SiLU()(x), rtol=1e-5, atol=1e-35)


def test_copies_are_refused_and_a_forked_child_works() -> None:
    fast = optg.compile(nn.Conv2d(2, 3, 3), x := torch.randn(1, 2, 5, 5))
    for copying in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="a compiled model cannot be copied or pickled"):
            copying(fast)
    with fast.lock:  # as if another thread were in a call
        child = os.fork()
        if child == 0:
            signal.alarm(20)
            os._exit(0 if fast(x).shape == (1, 3, 3, 3) else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_later_changes_of_the_model_have_no_effect() -> None:
    model, x = nn.Conv2d(2, 3, 3), torch.randn(1, 2, 5, 5)
    fast = optg.compile(model, x)
    before = fast(x)
    nn.init.zeros_(model.weight)
    assert torch.equal(fast(x), before) and model.training
    assert optg.compile(model, x)(x).std(dim=(2, 3)).max() == 0


def test_any_batch_size_and_memory_format() -> None:
    torch.manual_seed(0)
    model = nn.Conv2d(3, 4, 3)
    x = torch.randn(7, 3, 9, 9)
    fast = optg.compile(model, x[:2])
    assert fast(x[:0]).shape == (0, 4, 7, 7)
    exact = run_in_float64(model, x)
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
def test_wrong_inputs_are_refused(x: Tensor, message: str) -> None:
    fast = optg.compile(nn.Conv2d(2, 3, 3), torch.randn(1, 2, 5, 5))
    with pytest.raises(ValueError, match=message):
        fast(x)


def test_wrong_arguments_are_refused() -> None:
    model, x = nn.Conv2d(2, 3, 3), torch.randn(1, 2, 5, 5)
    for threads in (0, 2.5):
        with pytest.raises(ValueError, match=f"threads is {threads}; expected a whole number of at least 1"):
            optg.compile(model, x, threads=threads)
    with pytest.raises(ValueError, match="unknown instruction set 'sse9'; expected one of native"):
        optg.compile(model, x, isa="sse9")
    with pytest.raises(ValueError, match=r"is of torch.float64; the engine takes torch.float32"):
        optg.compile(model.double(), x.double())


def test_without_a_compiler_torch_runs_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_threads_share_only_large_work() -> None:
    for name, expected in (("digits", False), ("vgg19", True)):
        model, x = sparse(name, 0.9), torch.randn(1, *SHAPES[name])
        fast = optg.compile(model, x, threads=2)
        fast(x)
        (program,) = fast.network.parts[0].programs.values()
        assert program.shared == expected


def test_repr_shows_how_each_layer_runs() -> None:
    model = sparse("digits", 0.9)
    x = torch.randn(1, *SHAPES["digits"])
    text = repr(optg.compile(model, x))
    assert " 3×3 + relu" in text and "linear" not in text and "100.0%" in text


def test_repr_is_the_same_string_in_jupyter(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """In a notebook, rich displays what it prints and writes nothing to the console's file."""
    fast = optg.compile(sparse("digits", 0.9), torch.randn(1, *SHAPES["digits"]))
    fast.notes.append("a note")
    expected = repr(fast)
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert Console().is_jupyter
    assert repr(fast) == str(fast) == expected and "note: a note" in expected and not capsys.readouterr().out
