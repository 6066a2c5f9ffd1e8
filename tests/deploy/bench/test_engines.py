"""Engines that run on a GPU: which are offered, and what they run."""

import copy

import pytest
import torch
from torch import Tensor, nn

from optg.core.channels import coupled_channels
from optg.deploy.bench import engines
from optg.deploy.bench.engines import ENGINES, EngineInputs, select_engines
from tests.core.channels.nets import zero_half
from tests.toy import convnet

GPU_ENGINES = ["gpu bf16", "gpu bf16 2:4", "gpu bf16 shrunk"]
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


def wide() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(1, 24, 3), nn.ReLU(), nn.Flatten(), nn.Linear(24 * 36, 10)).eval()


def inputs(model: nn.Module) -> EngineInputs:
    return EngineInputs(model.eval(), torch.randn(4, 1, 8, 8), 1, None)  # type: ignore[arg-type]


@pytest.mark.parametrize("has_gpu", [False, True])
def test_engines_of_a_gpu_are_offered_only_where_there_is_one(has_gpu: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    assert [e.name for e in ENGINES if e.needs_gpu] == GPU_ENGINES
    assert [e.name for e in select_engines([]) if e.needs_gpu] == (GPU_ENGINES if has_gpu else [])
    if has_gpu:
        assert [e.name for e in select_engines(["gpu bf16 2:4"])] == ["gpu bf16 2:4"]
    else:
        with pytest.raises(ValueError, match="the engine 'gpu bf16 2:4' needs an NVIDIA GPU, and torch sees none"):
            select_engines(["torch", "gpu bf16 2:4"])


def test_the_shrunk_engine_runs_the_smaller_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "on_gpu", lambda model, example: lambda images: model(images))
    narrow, model = convnet().eval(), wide()
    zero_half(narrow, coupled_channels(narrow, torch.randn(1, 1, 8, 8)))
    for unchanged in (narrow, model):
        with pytest.raises(ValueError, match="no channel is 0"), pytest.warns(UserWarning, match="the model keeps its size"):
            engines.prepare_gpu_shrunk(inputs(unchanged))
    zero_half(model, coupled_channels(model, torch.randn(1, 1, 8, 8)))
    calls: list[nn.Module] = []

    def remember(small: nn.Module, example: Tensor) -> engines.Network:
        calls.append(small)
        return small

    monkeypatch.setattr(engines, "on_gpu", remember)
    given = inputs(copy.deepcopy(model))
    network = engines.prepare_gpu_shrunk(given)
    torch.testing.assert_close(network(given.example), model(given.example))
    assert [small[0].out_channels for small in calls] == [16]  # 12 are not 0


def test_the_two_four_engine_says_why_no_layer_is_converted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "semi_structured", lambda model: (model, {"7": "dense: its weight is not 2:4"}))
    monkeypatch.setattr(nn.Module, "to", lambda self, *args: self)
    with pytest.raises(ValueError, match="dense: its weight is not 2:4"):
        engines.prepare_gpu_two_four(inputs(convnet()))


@needs_cuda
def test_dense_and_shrunk_models_run_on_the_gpu() -> None:
    model = wide()
    zero_half(model, coupled_channels(model, torch.randn(1, 1, 8, 8)))
    given = inputs(model)
    with torch.no_grad():
        expected = model(given.example)
        for prepare in (engines.prepare_gpu, engines.prepare_gpu_shrunk):
            torch.testing.assert_close(prepare(given)(given.example), expected, atol=0.05, rtol=0.05)
