"""Which layers are prunable by default, and what their dimensions mean."""

import warnings

import pytest
import torch
from torch import nn

import optg
from optg.core.layer_kinds import REGISTERED
from optg.core.prunable import find_axes, find_prunable


def axes_of(module: nn.Module, include=None) -> dict[str, tuple[int, int, int]]:
    found = find_prunable(module, include, ())
    return {name: tuple(axes) for name, axes in zip(found, find_axes(module, found))}


@pytest.fixture(autouse=True)
def no_class_stays_registered():
    known = dict(REGISTERED)
    yield
    REGISTERED.clear()
    REGISTERED.update(known)


class Conv1D(nn.Module):
    """Like that of transformers: a linear layer with an input-first weight."""

    def __init__(self, nf: int, nx: int):
        super().__init__()
        self.nf = nf
        self.weight = nn.Parameter(torch.randn(nx, nf))
        self.bias = nn.Parameter(torch.zeros(nf))


class Channels(nn.Module):
    """Like PyG's Linear."""

    def __init__(self, inputs: int, outputs: int, flipped: bool = False):
        super().__init__()
        self.in_channels, self.out_channels = inputs, outputs
        self.weight = nn.Parameter(torch.randn(inputs, outputs) if flipped else torch.randn(outputs, inputs))
        self.other = nn.Parameter(torch.randn(4, 4))


class MyExperts(nn.Module):
    def __init__(self, transposed: bool = False):
        super().__init__()
        self.is_transposed = transposed
        self.gate_up_proj = nn.Parameter(torch.randn(3, 8, 4))
        self.gate_up_proj_bias = nn.Parameter(torch.randn(3, 8))
        self.scale = nn.Parameter(torch.randn(3, 1, 4))


@pytest.mark.parametrize(("kind", "gates"), [("LSTM", 4), ("GRU", 3), ("RNN", 1)])
def test_recurrent_layers_have_a_part_for_each_gate(kind, gates):
    layers = axes_of(getattr(nn, kind)(4, 5, num_layers=2, bidirectional=True))
    assert len(layers) == 8 and set(layers.values()) == {(0, 1, gates)}
    assert axes_of(getattr(nn, f"{kind}Cell")(4, 5)) == {"weight_ih": (0, 1, gates), "weight_hh": (0, 1, gates)}


def test_the_projection_of_an_lstm_is_one_part():
    assert axes_of(nn.LSTM(4, 6, proj_size=3))["weight_hr_l0"] == (0, 1, 1)


def test_other_packages_linear_layers_are_known_by_name_or_shape():
    assert axes_of(Conv1D(6, 4)) == {"weight": (1, 0, 1)}
    assert axes_of(Channels(3, 5)) == {"weight": (0, 1, 1)}
    assert axes_of(Channels(3, 5, flipped=True)) == {}


def test_stacked_experts_have_a_part_for_each_expert():
    assert axes_of(MyExperts()) == {"gate_up_proj": (1, 2, 3)}
    assert axes_of(MyExperts(transposed=True)) == {"gate_up_proj": (2, 1, 3)}
    named, other = nn.Module(), nn.Module()
    named.expert_weights, other.filters = nn.Parameter(torch.randn(3, 4, 5)), nn.Parameter(torch.randn(3, 4, 5))
    assert axes_of(named) == {"expert_weights": (1, 2, 3)} and axes_of(other) == {}


@pytest.mark.parametrize("name", ["qkv", "c_attn", "in_proj", "Wqkv"])
def test_fused_query_key_and_value_are_three_parts(name):
    def named(layer: nn.Module) -> nn.Module:
        block = nn.Module()
        block.attn = nn.Module()
        block.attn.add_module(name, layer)
        return block

    assert axes_of(named(nn.Linear(4, 12))) == {f"attn.{name}.weight": (0, 1, 3)}
    assert axes_of(named(Conv1D(12, 4))) == {f"attn.{name}.weight": (1, 0, 3)}
    assert axes_of(named(nn.Conv2d(4, 12, 1))) == {f"attn.{name}.weight": (0, 1, 3)}
    assert axes_of(named(nn.Linear(4, 8))) == {f"attn.{name}.weight": (0, 1, 1)}  # fewer keys and values than queries
    assert axes_of(nn.ModuleDict({"fc": nn.Linear(4, 12)})) == {"fc.weight": (0, 1, 1)}


def test_any_class_can_be_registered():
    class Mix(nn.Module):
        def __init__(self):
            super().__init__()
            self.w, self.bias = nn.Parameter(torch.randn(4, 6)), nn.Parameter(torch.randn(2, 6))

    class Mixes(Mix):
        pass

    assert axes_of(Mix()) == {}
    assert optg.prunable(Mix, output=1, input=0) is Mix
    assert axes_of(Mix()) == axes_of(Mixes()) == {"w": (1, 0, 1)}
    optg.prunable(Mixes)
    assert axes_of(Mixes()) == {"w": (0, 1, 1)}
    with pytest.raises(TypeError, match="not a module class"):
        optg.prunable(Mix())
    with pytest.raises(ValueError, match="two different dimensions"):
        optg.prunable(Mix, output=1)


@pytest.mark.parametrize("name", ["StdConv2d", "StdConv2dSame", "ScaledStdConv2d", "ScaledStdConv2dSame"])
def test_standardized_convolutions_stay_dense_with_a_warning(name):
    cls = type(name, (nn.Conv2d,), {})
    model = nn.Sequential(cls(3, 4, 3), nn.Conv2d(4, 4, 3))
    model[0].gain = nn.Parameter(torch.ones(4, 1, 1, 1))
    model[1].gain = nn.Parameter(torch.ones(4, 1, 1, 1))
    with pytest.warns(UserWarning, match=r"some layers stay dense: 0\. Their weights are computed .* weight standardization"):
        assert axes_of(model) == {"1.weight": (0, 1, 1)}


def test_recurrent_weight_norm_is_seen():
    with pytest.warns(FutureWarning):
        layer = nn.utils.weight_norm(nn.LSTM(3, 3), "weight_hh_l0")
    with pytest.warns(UserWarning, match="stay dense"):
        assert axes_of(nn.Sequential(layer)) == {}


class Lora(nn.Module):
    def __init__(self):
        super().__init__()
        self.base_layer = nn.Linear(8, 8)
        self.lora_A = nn.ModuleDict({"default": nn.Linear(8, 2, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(2, 8, bias=False)})


class Vera(nn.Module):
    adapter_layer_names = ("mine", "missing")

    def __init__(self):
        super().__init__()
        self.base_layer, self.mine = nn.Linear(8, 8), nn.Linear(8, 8)


def test_adapters_are_left_alone_unless_named():
    assert list(axes_of(Lora())) == list(axes_of(Vera())) == ["base_layer.weight"]
    assert list(axes_of(Lora(), include=["*lora_?*"])) == ["lora_A.default.weight", "lora_B.default.weight"]
    assert len(axes_of(Lora(), include=[..., "*lora_A*"])) == 2


def test_dots_stand_for_the_default():
    model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 4))
    assert list(axes_of(model, include=[...])) == ["1.weight"]
    assert list(axes_of(model, include=[..., nn.Embedding])) == ["0.weight", "1.weight"]
    with pytest.raises(ValueError, match="exclude holds"):
        find_prunable(model, None, [...])
    sparsifier = optg.sparsify(
        model, torch.optim.SGD(model.parameters(), lr=0.1), "gmp", sparsity=0.5, epochs=2, steps_per_epoch=1, include=...
    )
    assert list(sparsifier.masks) == ["1.weight"]


@pytest.mark.parametrize("kind", ["LSTM", "GRU"])
def test_a_recurrent_model_trains_sparse(kind):
    torch.manual_seed(0)
    model = getattr(nn, kind)(6, 8)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    # without a floor, a gate loses all its recurrent weights, which is warned about
    sparsifier = optg.sparsify(model, optimizer, sparsity=0.9, epochs=5, steps_per_epoch=2, floor=0.02)
    with warnings.catch_warnings(action="error"):
        for _ in range(10):
            optimizer.zero_grad()
            model(torch.randn(3, 2, 6))[0].square().mean().backward()
            optimizer.step()
        sparsifier.finish()
    zeros = sum(int((p == 0).sum()) for p in model.parameters() if p.ndim > 1)
    assert sparsifier.sparsity == zeros / sum(p.numel() for p in model.parameters() if p.ndim > 1) >= 0.9
