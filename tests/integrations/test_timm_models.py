"""A small model of each of 52 families of timm, with random weights: those that forward uses are sparse, or named as dense."""

import warnings
from importlib import import_module

import pytest
import torch
from torch import nn

import optg
from tests.integrations.used_weights import UsedWeights
from tests.torchvision_import import import_torchvision

SPARSITY, STEPS = 0.9, 3
IN_CI = {"resnet10t": 64, "vit_tiny_patch16_224": 64, "mobilenetv3_small_050": 64, "nf_regnet_b0": 64}
MODELS = IN_CI | {
    "deit_tiny_patch16_224": 64,
    "swin_tiny_patch4_window7_224": 56,
    "convnext_atto": 64,
    "mixer_s32_224": 64,
    "levit_128s": 64,
    "mnasnet_small": 64,
    "regnetx_002": 64,
    "densenet121": 64,
    "dla46_c": 64,
    "dpn48b": 64,
    "ghostnet_050": 64,
    "hrnet_w18_small": 64,
    "inception_v3": 96,
    "xception41": 64,
    "selecsls42": 64,
    "skresnet18": 64,
    "res2net50_48w_2s": 64,
    "resnest14d": 64,
    "rexnet_100": 64,
    "repvgg_a0": 64,
    "repghostnet_050": 64,
    "repvit_m0_9": 64,
    "tiny_vit_5m_224": 64,
    "twins_svt_small": 64,
    "visformer_tiny": 64,
    "xcit_nano_12_p16_224": 64,
    "poolformer_s12": 64,
    "pvt_v2_b0": 64,
    "pit_ti_224": 64,
    "mobilevit_xxs": 64,
    "mvitv2_tiny": 64,
    "hardcorenas_a": 64,
    "fasternet_t0": 64,
    "fastvit_t8": 64,
    "edgenext_xx_small": 64,
    "efficientformer_l1": 224,
    "efficientvit_b0": 64,
    "efficientvit_m0": 64,
    "crossvit_tiny_240": 240,
    "convit_tiny": 64,
    "cait_xxs24_224": 64,
    "hgnetv2_b0": 64,
    "sequencer2d_s": 64,
    "starnet_s1": 64,
    "resnetv2_18": 64,
    "inception_next_atto": 64,
    "mambaout_femto": 64,
    "ese_vovnet19b_dw": 64,
}


def create(name: str, size: int) -> nn.Module:
    import_torchvision()
    timm = import_module("timm")
    torch.manual_seed(0)
    try:
        return timm.create_model(name, num_classes=4, img_size=size)
    except TypeError:  # a convolutional net takes images of any size
        return timm.create_model(name, num_classes=4)


def check(name: str, size: int) -> str:
    """Train a sparse model and look at the weights that it uses. Return "sparse", or "warned" if it says what stays dense."""
    model = create(name, size)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        sparsifier = optg.sparsify(model, optimizer, "gmp", sparsity=SPARSITY, steps=STEPS)
    warned = any("stay dense" in str(w.message) for w in caught)
    images, labels = torch.randn(2, 3, size, size), torch.tensor([0, 1])
    for _ in range(STEPS):
        optimizer.zero_grad()
        outputs = model(images)
        logits = outputs[0] if isinstance(outputs, tuple) else outputs  # a distilled model has two heads
        nn.functional.cross_entropy(logits, labels).backward()
        optimizer.step()
    sparsifier.finish()
    removed = {name: ~mask for name, mask in sparsifier.masks.items()}
    with UsedWeights({name: model.get_parameter(name) for name in removed}, model) as used, torch.no_grad():
        model(images)
    assert sum(int(mask.sum()) for mask in removed.values()) == sparsifier.weights.zeros(SPARSITY)[0]
    assert warned or not used.computed, f"{name} computes weights without a warning: {used.computed[:3]}"
    for weight, zero in used.zero.items():
        assert zero.reshape(removed[weight].shape)[removed[weight]].all(), f"{name} uses removed weights of {weight}"
    assert set(used.zero) == set(removed), "a pruned weight was not seen in use"
    return "warned" if warned else "sparse"


@pytest.mark.parametrize("name", IN_CI)
def test_the_weights_in_use_are_sparse(name: str) -> None:
    assert check(name, IN_CI[name]) == ("warned" if name == "nf_regnet_b0" else "sparse")


@pytest.mark.long
@pytest.mark.parametrize("name", [name for name in MODELS if name not in IN_CI])
def test_the_weights_in_use_are_sparse_in_every_family(name: str) -> None:
    check(name, MODELS[name])
