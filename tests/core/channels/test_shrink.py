"""`optg.shrink` removes zero channels, and the smaller model computes the same."""

import copy
import warnings
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import optg
from optg import models
from optg.core.accounting import count
from optg.core.channels import coupled_channels
from tests.architecture.blocked import run_without
from tests.core.channels.nets import STEPS, RandomNet, UNet, conv, difference, fill, zero, zero_half
from tests.toy import convnet, mlp

IMAGE = torch.zeros(1, 3, 4, 4)


def removed(model: nn.Module, example: Any) -> tuple[nn.Module, float]:
    """Zero half of the units of a model. Return the shrunk model, and its difference from the zeroed one."""
    fill(model)
    assert zero_half(model, coupled_channels(model, example)) > 0
    small = optg.shrink(model, example)
    return small, difference(model, small, example)


@pytest.mark.parametrize(
    ("name", "size", "part"),
    [
        ("vgg19", 32, 0.26),
        ("mobilenet_v1", 32, 0.28),
        ("resnet50", 32, 0.29),
        ("resnet20", 32, 0.45),
        ("vit_ti-cifar", 32, 0.68),
    ],
)
def test_models_of_the_registry(name: str, size: int, part: float) -> None:
    """`part` is the part of FLOPs that may stay after half of the removable units went."""
    example = torch.zeros(1, 3, size, size)
    model = models.build(name, 10)
    small, error = removed(model, example)
    assert error < 1e-5
    dense, left = count(model, example).dense_flops, count(small, example)
    assert left.dense_flops < part * dense
    assert left.flops == left.dense_flops, "a zero is left"


def test_resnet18(torchvision: Any) -> None:
    model = torchvision.resnet18(num_classes=10)
    small, error = removed(model, torch.zeros(1, 3, 64, 64))
    assert error < 1e-5
    assert small.conv1.out_channels == 32 and small.layer4[1].bn2.num_features == 256 and small.fc.in_features == 256


def test_unet() -> None:
    small, error = removed(UNet(), torch.zeros(1, 3, 16, 16))
    assert error < 1e-5
    assert tuple(small.join1.weight.shape) == (4, 8, 3, 3)  # 4 channels of the skip, 4 from below
    assert tuple(small.up2.weight.shape) == (16, 8, 2, 2) and small.up2.in_channels == 16 and small.up2.out_channels == 8


def test_the_mlps_of_a_vit(torchvision: Any) -> None:
    import timm  # after torchvision, which it imports

    model = timm.create_model("vit_tiny_patch16_224", depth=2, img_size=32, num_classes=10)
    small, error = removed(model, torch.zeros(1, 3, 32, 32))
    assert error < 1e-5
    assert [block.mlp.fc1.out_features for block in small.blocks] == [384, 384]
    assert small.blocks[0].attn.qkv.weight.shape == (576, 192)


def test_the_mlps_of_gpt2() -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=50, n_positions=16, n_embd=16, n_layer=2, n_head=2, n_inner=24)).eval()
    example = {"input_ids": torch.arange(8)[None]}
    zero_half(model, coupled_channels(model, example))
    small = optg.shrink(model, example)
    assert [block.mlp.c_fc.nf for block in small.transformer.h] == [12, 12]
    torch.testing.assert_close(small(**example).logits, model(**example).logits, atol=1e-5, rtol=1e-5)


# ---- random networks


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_random_networks(data: st.DataObject) -> None:
    steps = data.draw(st.lists(st.tuples(st.sampled_from(sorted(STEPS)), st.integers(1, 5)), min_size=1, max_size=5))
    model = fill(RandomNet(steps, data.draw(st.booleans(), "flatten"), data.draw(st.integers(1, 5), "width")))
    groups = coupled_channels(model, IMAGE)
    for group in groups:
        if group.removable:
            zero(model, group, data.draw(st.lists(st.integers(0, group.size - 1), unique=True, max_size=group.size - 1)))
    with warnings.catch_warnings(action="ignore"):
        small = optg.shrink(model, IMAGE, multiple=data.draw(st.integers(1, 4), "multiple"))
    assert difference(model, small, IMAGE) < 1e-5


# ---- multiples


@pytest.mark.parametrize("multiple", [pytest.param(4, marks=pytest.mark.long), 8])
@pytest.mark.parametrize("name", ["resnet18", "vgg19", "unet"])
def test_channels_stay_in_multiples(name: str, multiple: int) -> None:
    model = fill(UNet() if name == "unet" else models.build(name, 10))
    example = torch.zeros(1, 3, 32, 32)
    groups = [group for group in coupled_channels(model, example) if group.removable]
    for group in groups:
        zero(model, group, list(range(0, group.size, 2))[:-1])  # one more than half stays
    small = optg.shrink(model, example, multiple=multiple)
    assert difference(model, small, example) < 1e-5
    names = {module: name for name, module in model.named_modules()}
    layers = [module for module in model.modules() if isinstance(module, (nn.Conv2d, nn.ConvTranspose2d, nn.Linear))]
    for layer in layers:
        for dense, left in zip(layer.weight.shape[:2], small.get_submodule(names[layer]).weight.shape[:2]):
            assert left == dense or (left % multiple == 0 and dense / 2 < left <= dense / 2 + 2 * multiple)
    assert sum(p.numel() for p in small.parameters()) < sum(p.numel() for p in model.parameters())


def test_the_first_zero_channels_stay() -> None:
    model = fill(nn.Sequential(nn.Linear(3, 10), nn.ReLU(), nn.Linear(10, 2)))
    with torch.no_grad():
        for zeros in (model[0].weight, model[0].bias):
            zeros[[1, 2, 4, 6, 7, 9]] = 0
    for multiple, kept in [(1, [0, 3, 5, 8]), (3, [0, 1, 2, 3, 5, 8]), (4, [0, 3, 5, 8]), (7, [0, 1, 2, 3, 4, 5, 8])]:
        small = optg.shrink(model, torch.zeros(1, 3), multiple=multiple)
        assert torch.equal(small[0].weight, model[0].weight[kept]) and torch.equal(small[2].weight, model[2].weight[:, kept])


def test_units_of_several_channels_count_as_such() -> None:
    """Each unit owns 4 channels of the group norm, so 2 units are a multiple of 8."""
    model = fill(nn.Sequential(conv(3, 32), nn.GroupNorm(8, 32), nn.ReLU(), conv(32, 2)))
    (group,) = (group for group in coupled_channels(model, IMAGE) if group.removable)
    zero(model, group, [0, 2, 3, 5, 7])
    small = optg.shrink(model, IMAGE, multiple=8)
    assert (small[0].out_channels, small[1].num_groups, small[3].in_channels) == (16, 4, 16)
    assert difference(model, small, IMAGE) < 1e-5


def test_a_multiple_larger_than_the_layers_keeps_the_model() -> None:
    model = fill(nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 2)))
    with torch.no_grad():
        model[0].weight[:4] = model[0].bias[:4] = 0
    with pytest.warns(UserWarning, match="or too few to leave a multiple of 16: the model keeps its size"):
        assert optg.shrink(model, torch.zeros(1, 3), multiple=16)[0].out_features == 8


def test_a_multiple_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="multiple is 0; expected at least 1"):
        optg.shrink(mlp(), torch.zeros(1, 1, 8, 8), multiple=0)


# ---- what is removed


def test_only_units_that_are_zero_in_all_coupled_layers_go() -> None:
    model = fill(convnet())
    with torch.no_grad():
        model[0].weight[:3] = 0  # three filters, but the norm of the third adds a constant
        model[1].weight[:3] = 0
        model[1].bias[:2] = 0
        model[4].weight[5] = -0.0
        model[4].bias[5] = 0
    before = copy.deepcopy(model.state_dict())
    small = optg.shrink(model, torch.zeros(1, 1, 8, 8))
    assert (small[0].out_channels, small[1].num_features, small[4].in_channels) == (6, 6, 6)
    assert (small[4].out_channels, small[7].in_features) == (7, 7 * 16)
    assert torch.equal(small[0].weight, model[0].weight[2:]) and torch.equal(small[1].running_var, model[1].running_var[2:])
    assert difference(model, small, torch.zeros(1, 1, 8, 8)) < 1e-6
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


def test_one_unit_of_a_dead_group_stays() -> None:
    model = fill(mlp())
    with torch.no_grad():
        model[1].weight.zero_()
    with pytest.warns(UserWarning, match=r"all channels of 1\.weight are 0; at least one of each stays"):
        small = optg.shrink(model, torch.zeros(1, 1, 8, 8))
    assert small[1].out_features == small[3].in_features == 1
    assert difference(model, small, torch.zeros(1, 1, 8, 8)) == 0
    with pytest.warns(UserWarning, match=r"at least one of each stays"):
        assert optg.shrink(model, torch.zeros(1, 1, 8, 8), multiple=5)[1].out_features == 5


def test_a_model_without_zero_channels_keeps_its_size() -> None:
    with pytest.warns(UserWarning, match="no channel is 0 in all its coupled layers"):
        small = optg.shrink(fill(mlp()), torch.zeros(1, 1, 8, 8))
    assert small[1].out_features == 32


def test_settings_of_the_model_stay() -> None:
    model = fill(convnet()).train()
    model[4].requires_grad_(False)
    zero_half(model, coupled_channels(model, torch.zeros(1, 1, 8, 8)))
    small = optg.shrink(model, torch.zeros(1, 1, 8, 8))
    assert small.training and small[1].training
    assert [p.requires_grad for p in small.parameters()] == [p.requires_grad for p in model.parameters()]
    small(torch.randn(4, 1, 8, 8)).sum().backward()
    assert small[0].weight.grad.shape == small[0].weight.shape


def test_shared_weights_stay_shared() -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.again, self.last = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 2)
            self.again.weight = self.first.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(self.again(self.first(x).relu()).relu())

    model = fill(Shared())
    (group, *_) = groups = coupled_channels(model, torch.zeros(1, 6))
    assert group.refusal, "the input of the network is fixed, so its weight is too"
    assert len(groups) == 2

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.layer, self.last = nn.Linear(5, 6), nn.Linear(6, 6), nn.Linear(6, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.stem(x)
            for _ in range(3):
                x = x + self.layer(x).relu()
            return self.last(x)

    small, error = removed(Twice(), torch.zeros(1, 5))
    assert error < 1e-5 and small.layer.weight.shape == (3, 3)


def test_a_wrapped_model_is_unwrapped() -> None:
    model = fill(convnet())
    zero_half(model, coupled_channels(model, torch.zeros(1, 1, 8, 8)))
    small = optg.shrink(torch.compile(nn.DataParallel(model)), torch.zeros(1, 1, 8, 8))
    assert type(small) is nn.Sequential and small[0].out_channels == 4


def test_a_trained_model_after_masks_of_elsewhere() -> None:
    from torch.nn.utils import prune

    model = fill(mlp())
    prune.ln_structured(model[1], "weight", amount=20, n=2, dim=0)
    with pytest.raises(ValueError, match=r"the model cannot be copied: .*call optg.masks_from\(model\) first"):
        model[1].weight.sum().backward()  # keeps a graph behind the weight
        optg.shrink(model, torch.zeros(1, 1, 8, 8))
    optg.masks_from(model)
    assert optg.shrink(model, torch.zeros(1, 1, 8, 8))[1].out_features == 12


# ---- bad inputs


def test_without_torch_pruning_the_install_command_is_named() -> None:
    program = """
import torch, optg
optg.sparsify
try:
    optg.shrink(torch.nn.Linear(2, 2), torch.zeros(1, 2))
except ImportError as error:
    print(error)
"""
    done = run_without(["torch_pruning"], program)
    assert done.stdout.strip() == "finding coupled channels needs torch-pruning: pip install 'optg[shrink]'", done.stderr


def test_a_model_that_cannot_be_run_or_traced() -> None:
    with pytest.raises(ValueError, match="the model cannot be traced: mat1 and mat2 shapes cannot be multiplied"):
        optg.shrink(mlp(), torch.zeros(1, 1, 3, 3))

    class NoGradient(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 2)

        @torch.no_grad()
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x)

    with pytest.raises(ValueError, match="the model cannot be traced: autograd sees no output that depends on parameters"):
        optg.shrink(NoGradient(), torch.zeros(1, 2))


def test_an_example_on_another_device() -> None:
    with pytest.raises(ValueError, match="the example is on meta, the model on cpu; move the example there"):
        optg.shrink(mlp(), torch.zeros(1, 1, 8, 8, device="meta"))


def test_float16_and_channels_last() -> None:
    model = fill(nn.Sequential(conv(3, 8), nn.ReLU(), conv(8, 4))).to(torch.bfloat16, memory_format=torch.channels_last)
    example = torch.zeros(1, 3, 4, 4, dtype=torch.bfloat16)
    zero_half(model, coupled_channels(model, example))
    small = optg.shrink(model, example)
    assert small[0].out_channels == 4 and small[2].weight.dtype == torch.bfloat16
    assert small[2].weight.is_contiguous(memory_format=torch.channels_last)
    assert difference(model, small, example) < 0.02
