"""optg.quantize, and the engine on what it returns."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import optg
from optg.deploy import quantize as module
from optg.deploy.engine.int8.segment import Int8Segment
from optg.deploy.export import load_data, open_trained
from optg.training.saved import SavedRun
from tests.deploy.nets import SHAPES, sparse


def batches(name: str, count: int = 2, size: int = 8) -> list[Tensor]:
    torch.manual_seed(1)
    return [torch.randn(size, *SHAPES[name]) for _ in range(count)]


def correlation(a: Tensor, b: Tensor) -> float:
    return float(torch.corrcoef(torch.stack([a.flatten(), b.flatten()]))[0, 1])


@pytest.mark.parametrize("name", ["digits", "vgg19", "resnet50", "mobilenet_v1"])
def test_whole_models_run_on_bytes(name: str) -> None:
    """Rounding differs from torch's in single steps, which many layers of random weights amplify."""
    model = sparse(name, 0.8)
    quantized = optg.quantize(model, batches(name))
    x = torch.randn(5, *SHAPES[name])
    fast = optg.compile(quantized, x[:1], threads=2)
    assert not fast.notes and [type(part) for part in fast.network.parts] == [Int8Segment]
    with torch.no_grad():
        exact, emulated, got = model(x), quantized(x), fast(x)
    assert correlation(got, emulated) > 0.97
    assert correlation(got, exact) > 0.8
    assert torch.equal(torch.cat([fast(x[i : i + 1]) for i in range(5)]), got)


def test_a_trained_model_keeps_its_accuracy(trained_run: Path) -> None:
    trained = open_trained(trained_run)
    data = load_data(SavedRun.open(trained_run).plan.recipe, 100)
    images, labels = (torch.cat(parts) for parts in zip(*data.test()))
    fast = optg.compile(trained.model, trained.example, precision="int8", calibration=[images[:200]])
    with torch.no_grad():
        correct = [int((run(images).argmax(1) == labels).sum()) for run in (trained.model, fast)]
    assert correct[0] > 0.5 * len(labels)
    assert abs(correct[0] - correct[1]) <= 0.02 * len(labels)


def test_zeros_stay_zero_and_weights_keep_their_names() -> None:
    model = sparse("resnet20", 0.9)
    before = copy.deepcopy(model.state_dict())
    state = optg.quantize(model, batches("resnet20")).state_dict()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    layers = [name for name, value in before.items() if value.ndim in (2, 4)]
    assert len(layers) > 15
    for name in layers:
        values = state[name]
        assert values.dtype == torch.int8 and values.abs().max() == 127
        assert not values[before[name] == 0].any()
        assert (state[f"{name}_scale"] > 0).all() and not state[f"{name}_zero_point"].any()


def test_compile_quantizes_in_one_call() -> None:
    model, x = sparse("digits", 0.8), torch.randn(3, *SHAPES["digits"])
    fast = optg.compile(model, x, precision="int8", calibration=batches("digits"))
    assert "int8 " in repr(fast)
    assert torch.equal(fast(x), optg.compile(optg.quantize(model, batches("digits")), x)(x))


def test_layers_to_keep_stay_in_float() -> None:
    model, x = sparse("resnet20", 0.9), torch.randn(2, *SHAPES["resnet20"])
    names = [name for name, layer in model.named_modules() if isinstance(layer, (nn.Conv2d, nn.Linear))]
    kept = [names[0], names[-1]]
    quantized = optg.quantize(model, batches("resnet20"), keep_float=kept)
    state = quantized.state_dict()
    assert [name for name in names if state[f"{name}.weight"].dtype == torch.float32] == kept
    fast = optg.compile(quantized, x)
    assert [row[1].startswith("int8") for row in fast.rows() if row[0].endswith(".weight")] == [n not in kept for n in names]
    with torch.no_grad():
        assert (fast(x) - quantized(x)).abs().max() < 0.1 * quantized(x).abs().max()


def test_layers_that_see_tokens_stay_in_float() -> None:
    """Only the convolution and the head of a vision transformer see images or features."""
    model, x = sparse("vit_ti-cifar", 0.9), torch.randn(2, *SHAPES["vit_ti-cifar"])
    quantized = optg.quantize(model, batches("vit_ti-cifar", 1, 2))
    names = [name for name, value in quantized.state_dict().items() if value.dtype == torch.int8]
    assert len(names) <= 2 < sum(isinstance(layer, nn.Linear) for layer in model.modules())
    with torch.no_grad():
        assert correlation(optg.compile(quantized, x)(x), quantized(x)) > 0.99


def test_a_pattern_without_a_layer_is_refused() -> None:
    with pytest.raises(ValueError, match=r"no layer is named 'layer9\.\*'; the layers are"):
        optg.quantize(sparse("digits"), batches("digits"), keep_float=["layer9.*"])


class Branches(nn.Module):
    """Concatenation, activations by table, a sum of two sums, an average pooling, and an output in the middle."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(3, 8, 1)
        self.c = nn.Conv2d(16, 16, 3, padding=1, groups=16)
        self.d, self.norm = nn.Conv2d(16, 16, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(16)
        self.head = nn.Linear(16 * 4 * 4, 7)

    def forward(self, x: Tensor, scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
        x = torch.cat([F.hardswish(self.a(x)), F.silu(self.b(x))], 1)
        y = F.relu6(self.c(x)) + x
        y = F.avg_pool2d(torch.relu(self.norm(self.d(y))), 2)
        return y, self.head(y.flatten(1))


def test_branches_agree_with_torch() -> None:
    torch.manual_seed(0)
    model = Branches().eval()
    data = [(torch.randn(4, 3, 16, 16), torch.zeros(4)) for _ in range(3)]  # as a loader yields them, with labels
    quantized = optg.quantize(model, data)
    fast = optg.compile(quantized, data[0][0][:1])
    assert not fast.notes
    with torch.no_grad():
        for got, emulated, exact in zip(fast(data[0][0]), quantized(data[0][0]), model(data[0][0])):
            assert (got - emulated).abs().max() < 0.05 * exact.abs().max()
            assert (got - exact).abs().max() < 0.1 * exact.abs().max()


@pytest.mark.parametrize(
    "options, message",
    [
        ({"precision": "int8"}, "needs calibration="),
        ({"precision": "int4"}, "expected 'float32' or 'int8'"),
        ({"calibration": [torch.zeros(1, 1, 8, 8)]}, "only work with precision='int8'"),
        ({"precision": "int8", "calibration": []}, "there are no batches"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        optg.compile(sparse("digits"), torch.zeros(1, 1, 8, 8), **options)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "torchao.quantization", None)
    with pytest.raises(ImportError, match=r"pip install 'optg\[int8\]'"):
        module.import_pt2e()
