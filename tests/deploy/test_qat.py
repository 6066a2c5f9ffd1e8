"""Quantization-aware training: twins, int8 models with trained ranges, and the lines of docs/int8.md."""

import copy
import re
import warnings
from pathlib import Path

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

import optg
import optg.deploy
from optg.deploy.engine.int8.segment import Int8Segment
from optg.deploy.qat import activations, fake_quantized, quantized, ranges_of
from optg.deploy.quantize import import_pt2e, quiet
from tests.toy import attach, batches, convnet, entropy, step

PAGE = Path(__file__).parents[2] / "docs" / "int8.md"


class Residual(nn.Module):
    """Batch norms after full, strided and depthwise convolutions, in-place activations and a sum, dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU6(inplace=True))
        self.deep = nn.Sequential(nn.Conv2d(8, 8, 3, 2, 1, groups=8), nn.BatchNorm2d(8), nn.Hardswish(inplace=True))
        self.wide = nn.Sequential(nn.Conv2d(8, 16, 1), nn.BatchNorm2d(16))
        self.short = nn.Sequential(nn.Conv2d(8, 16, 1, 2), nn.BatchNorm2d(16))
        self.top = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.2), nn.Linear(16, 10))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        y = self.wide(self.deep(x))
        y += self.short(x)
        return self.top(F.relu(y, inplace=True))


def train_in_int8(model: nn.Module, images: Tensor) -> fx.GraphModule:
    """Make a model sparse and train it in int8 for some steps. Return its twin."""
    labels = torch.randint(10, (len(images),))
    optimizer, sparsifier = attach(model, None, "snip", 0.5, loss=entropy, batches=[(images, labels)])
    twin = fake_quantized(model, images[:2])
    for count in (8, 8, 7, 3):
        step(twin, optimizer, (images[:count], labels[:count]))
        assert sparsifier.verify().ok
    return twin


def test_a_trained_model_runs_on_bytes_and_agrees_with_its_twin() -> None:
    torch.manual_seed(0)
    model, images = Residual(), torch.randn(8, 1, 8, 8)
    twin = train_in_int8(model, images)
    before = copy.deepcopy(model.state_dict())
    int8 = quantized(model, images[:2], ranges_of(twin))
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    state, layers = int8.state_dict(), [key for key, value in before.items() if value.ndim in (2, 4)]
    assert len(layers) == 5 and len(activations(twin)) == 8
    for key in layers:
        assert state[key].dtype == torch.int8 and not state[key][before[key] == 0].any() and state[key].any()
    fast = optg.compile(int8, images[:1])
    assert not fast.notes and [type(part) for part in fast.network.parts] == [Int8Segment]

    with quiet():
        import_pt2e().move_exported_model_to_eval(twin)
    for module in activations(twin):
        module.disable_observer()
    with torch.no_grad():
        found, expected = int8(images), twin(images)
    assert torch.corrcoef(torch.stack([found.flatten(), expected.flatten()]))[0, 1] > 0.999


def test_a_twin_shares_parameters_and_statistics() -> None:
    model = convnet()
    random = torch.get_rng_state()
    twin = fake_quantized(model.eval(), torch.zeros(2, 1, 8, 8))
    assert torch.equal(random, torch.get_rng_state()) and not model.training
    own = dict(model.named_parameters())
    assert own.keys() == dict(twin.named_parameters()).keys()
    assert all(p is own[name] for name, p in twin.named_parameters())
    before = copy.deepcopy(model[1].state_dict())
    twin(torch.randn(4, 1, 8, 8))
    assert model[1].num_batches_tracked == 1 and not torch.equal(model[1].running_var, before["running_var"])


def test_what_cannot_be_trained_is_refused() -> None:
    class Noise(nn.Module):
        """Adds a layer in training only."""

        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.a(F.relu(self.b(x)) if self.training else x)

    class Fixed(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.reshape(2, 4) + (1 if x.shape[0] == 2 else 0)

    images = torch.zeros(2, 4)
    for model, reason in (
        (nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2, eps=1e-3)), "momentum 0.1 and eps 0.001; to train in int8"),
        (nn.Linear(4, 4).double(), "no layer of this model can run in int8"),
        (Noise(), "behaves the same in both"),
        (Fixed(), "takes only one batch size"),
        (nn.Linear(5, 4), "torch.export cannot capture this model"),
    ):
        example = torch.zeros(2, 1, 8, 8) if isinstance(model, nn.Sequential) else images
        with pytest.raises(ValueError, match=reason):
            fake_quantized(model, example.to(next(model.parameters(), images).dtype))
    with pytest.raises(ValueError, match="there are ranges of 1 activations, but the model has 2"):
        layers = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
        quantized(layers, images, {"minimum": torch.zeros(1), "maximum": torch.ones(1)})


@pytest.mark.parametrize("norm", [False, pytest.param(True, marks=pytest.mark.long)])  # PT2E takes 20 s to fold a batch norm
def test_the_lines_of_the_docs(norm: bool) -> None:
    torch.manual_seed(0)
    model, data = convnet(norm), batches(6)
    optimizer, sparsifier = attach(model, None, "snip", 0.8, loss=entropy, batches=data)
    step(model, optimizer, data[0])
    code = re.search(r"```python\n(from torch.export.*?)```", PAGE.read_text(), re.DOTALL)
    assert code
    names = {"model": model, "optimizer": optimizer, "sparsifier": sparsifier, "loader": data[2:], "images": data[0][0]}
    with quiet(), warnings.catch_warnings():
        exec(code[1], names | {"optg": optg, "loss_fn": F.cross_entropy}, found := {})
    assert found["prepared"].get_parameter("0.weight") is model[0].weight and sparsifier.verify().ok
    weights = {value.shape: value for value in found["quantized"].state_dict().values() if value.dtype == torch.int8}
    layers = [p for p in model.parameters() if p.ndim > 1]
    assert len(layers) == len(weights) == 3
    for p in layers:
        assert (p == 0).any() and not weights[p.shape][p == 0].any() and weights[p.shape].abs().max() == 127
    assert [type(part) for part in found["fast"].network.parts] == [Int8Segment]
