"""The networks: sizes and FLOPs as printed in the papers, gradients, compilation, and one sparse training step."""

import math
from collections.abc import Callable
from functools import cache, partial
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn

import optg
from optg.core.accounting import count
from optg.core.prunable import find_prunable
from optg.models import MODELS, build
from optg.models.resnet import Bottleneck, resnet, resnet_cifar
from optg.models.vit import ViT
from tests.toy import step


class Row(NamedTuple):
    shape: tuple[int, int, int]  # of an image
    classes: int
    parameters: int
    flops: int
    prunable: int


DIGITS, CIFAR, IMAGENET = (1, 8, 8), (3, 32, 32), (3, 224, 224)
TABLE = {
    "digits": Row(DIGITS, 10, 98_026, 1_498_112, 97_568),
    "vgg19": Row(CIFAR, 10, 20_035_018, 398_136_320, 20_024_000),  # OptG's paper: 20.04M, 398M
    "vgg19-maxpool": Row(CIFAR, 10, 20_035_018, 398_136_320, 20_024_000),
    "resnet20": Row(CIFAR, 10, 269_722, 40_551_040, 268_336),  # He et al., Table 6: 0.27M
    "resnet32": Row(CIFAR, 10, 464_154, 68_862_592, 461_872),  # 0.46M
    "resnet44": Row(CIFAR, 10, 658_586, 97_174_144, 655_408),  # 0.66M
    "resnet56": Row(CIFAR, 10, 853_018, 125_485_696, 848_944),  # 0.85M
    "resnet110": Row(CIFAR, 10, 1_727_962, 252_887_680, 1_719_856),  # 1.7M
    "resnet18-cifar": Row(CIFAR, 10, 11_173_962, 555_422_720, 11_164_352),
    "resnet50-cifar": Row(CIFAR, 10, 23_520_842, 1_297_829_888, 23_467_712),
    "mobilenet_v1-cifar": Row(CIFAR, 10, 3_217_226, 175_556_608, 3_195_328),
    "vit_ti-cifar": Row(CIFAR, 10, 5_362_762, 345_638_784, 5_319_552),
    "resnet18": Row(IMAGENET, 1000, 11_689_512, 1_814_073_344, 11_678_912),  # torchvision: 11,689,512
    "resnet50": Row(IMAGENET, 1000, 25_557_032, 4_089_184_256, 25_502_912),  # 25.6M, 4.09G
    "mobilenet_v1": Row(IMAGENET, 1000, 4_231_976, 568_740_352, 4_209_088),  # Howard et al.: 4.2M, 569M; OptG's: 4.12M
    "vit_s": Row(IMAGENET, 1000, 22_050_664, 4_241_218_560, 21_912_576),  # DeiT-S: 22M; 4.6G with the products inside attention
}
ONE_OF_EACH_FAMILY = ("digits", "vgg19", "resnet20", "mobilenet_v1", "vit_ti-cifar")


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


@cache
def built(name: str) -> nn.Module:
    """Build a model once for all tests that do not change its weights."""
    return build(name, TABLE[name].classes)


def random_images(name: str, batch: int) -> Tensor:
    """Return random images, small ones if the network accepts any size."""
    channels, height, width = TABLE[name].shape
    if (height, width) == (224, 224) and name != "vit_s":
        height = width = 64
    return torch.randn(batch, channels, height, width)


def test_the_table_has_every_model() -> None:
    assert list(TABLE) == list(MODELS)


@pytest.mark.parametrize("name", TABLE)
def test_parameters_flops_and_prunable_weights(name: str) -> None:
    row = TABLE[name]
    account = count(built(name), torch.randn(1, *row.shape))
    assert (account.parameters, account.dense_flops) == (row.parameters, row.flops)
    prunable = find_prunable(built(name), None, ())
    assert sum(p.numel() for p in prunable.values()) == row.prunable
    assert {layer.name.split("[")[0] for layer in account.layers} == set(prunable)


@pytest.mark.parametrize("name", TABLE)
def test_every_parameter_gets_a_finite_gradient(name: str) -> None:
    net, batch = built(name).train(), random_images(name, 2)
    output = net(batch)
    assert output.shape == (2, TABLE[name].classes) and output.isfinite().all()
    nn.functional.cross_entropy(output, torch.tensor([0, 1])).backward()
    grads = {n: p.grad for n, p in net.named_parameters()}
    net.zero_grad(set_to_none=True)
    assert all(g is not None and g.isfinite().all() and g.any() for g in grads.values())


@pytest.mark.parametrize("name", TABLE)
def test_channels_last_gives_the_same_output(name: str) -> None:
    net, batch = built(name).eval(), random_images(name, 1)
    with torch.no_grad():
        expected = net(batch)
        net.to(memory_format=torch.channels_last)
        found = net(batch.to(memory_format=torch.channels_last))
        net.to(memory_format=torch.contiguous_format)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)


def shallow_resnet() -> nn.Module:
    return resnet(Bottleneck, (1, 2), 8, 10, small_images=False)


def shallow_vit() -> nn.Module:
    return ViT(image=32, patch=4, width=48, heads=3, classes=10, depth=2)


# The deepest networks have few layers here, because tracing is slow and their layers are alike.
GRAPHS = {
    "digits": (partial(built, "digits"), DIGITS, True),
    "vgg19": (partial(built, "vgg19"), CIFAR, True),
    "resnet20": (partial(built, "resnet20"), CIFAR, True),
    "mobilenet_v1": (partial(built, "mobilenet_v1"), CIFAR, True),
    "bottlenecks": (shallow_resnet, CIFAR, True),
    "vit, training": (shallow_vit, CIFAR, True),
    "vit, evaluation": (shallow_vit, CIFAR, False),
}


@pytest.mark.parametrize(("make", "shape", "training"), GRAPHS.values(), ids=GRAPHS)
def test_one_graph_for_every_batch_size(make: Callable[[], nn.Module], shape: tuple[int, ...], training: bool) -> None:
    graphs = []

    def eager(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., object]:
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    compiled = torch.compile(make().train(training), backend=eager, fullgraph=True, dynamic=True)
    with torch.set_grad_enabled(training):
        for batch in (2, 3, 5):
            assert compiled(torch.randn(batch, *shape)).shape[0] == batch
    assert len(graphs) == 1


@pytest.mark.parametrize("name", ONE_OF_EACH_FAMILY)
def test_a_sparse_step_prunes_half_of_the_weights(name: str) -> None:
    net, row = build(name, TABLE[name].classes), TABLE[name]
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
    sparsifier = optg.sparsify(net, optimizer, sparsity=0.5, epochs=2, steps_per_epoch=1)
    step(net, optimizer, (random_images(name, 4), torch.arange(4)))
    masks = sparsifier.masks
    assert sum(mask.numel() for mask in masks.values()) == row.prunable
    assert sum(int((~mask).sum()) for mask in masks.values()) == math.ceil(0.5 * row.prunable)
    assert all(not net.get_parameter(n)[~mask].any() for n, mask in masks.items())


@pytest.mark.parametrize("name", TABLE)
def test_any_number_of_classes(name: str) -> None:
    with torch.device("meta"):
        net = build(name, 7)
        assert net.train()(torch.empty(2, *TABLE[name].shape)).shape == (2, 7)


# ---- properties of each network in its paper


def test_vgg_averages_its_last_pixels_or_takes_their_maximum() -> None:
    average, maximum = built("vgg19"), built("vgg19-maxpool")
    kinds = [type(layer) for layer in average.features]
    assert kinds.count(nn.Conv2d) == 16 and kinds.count(nn.MaxPool2d) == 4
    assert [type(layer) for layer in maximum.features] == [*kinds, nn.MaxPool2d]
    assert average.features.eval()(torch.randn(1, 3, 32, 32)).shape == (1, 512, 2, 2)
    assert maximum.features.eval()(torch.randn(1, 3, 32, 32)).shape == (1, 512, 1, 1)


@pytest.mark.parametrize(
    ("name", "layer", "fan"),
    [
        ("vgg19", "features.3", 64 * 9),
        ("resnet50", "conv1", 64 * 49),  # fan_out
        ("mobilenet_v1", "features.75", 9),  # depthwise
        ("mobilenet_v1", "features.78", 1024),
    ],
)
def test_convolutions_start_with_kaiming_scale(name: str, layer: str, fan: int) -> None:
    weight = built(name).get_submodule(layer).weight
    assert weight.std().item() == pytest.approx(math.sqrt(2 / fan), rel=0.05)


def test_encoder_layers_start_with_different_weights() -> None:
    first, second = (block.linear1.weight for block in built("vit_ti-cifar").blocks[:2])
    assert first.std().item() == pytest.approx(0.02, rel=0.05) and not torch.equal(first, second)


def test_the_shortcut_of_small_resnets_has_no_parameters() -> None:
    block = built("resnet20").layer2[0].eval()
    x = torch.rand(1, 16, 4, 4)
    nn.init.zeros_(block.bn2.weight)  # leaves only the shortcut
    y = block(x)
    nn.init.ones_(block.bn2.weight)
    assert torch.equal(y[:, :16], x[:, :, ::2, ::2]) and not y[:, 16:].any()


def test_resnet50_has_the_names_of_torchvision() -> None:
    names = built("resnet50").state_dict()
    assert len(names) == 320  # as in torchvision
    assert names["conv1.weight"].shape == (64, 3, 7, 7)
    assert names["layer2.0.conv2.weight"].shape == (128, 128, 3, 3)
    assert names["layer4.0.downsample.0.weight"].shape == (2048, 1024, 1, 1)
    assert names["layer4.2.bn3.running_var"].shape == (2048,)
    assert names["fc.bias"].shape == (1000,)
    assert built("resnet50").layer2[0].conv2.stride == (2, 2)


def test_impossible_depths_of_small_resnets_are_refused() -> None:
    with pytest.raises(ValueError, match="depth is 21; expected 6n \\+ 2"):
        resnet_cifar(21)


def test_vit_refuses_images_of_another_size() -> None:
    with pytest.raises(ValueError, match="images are 28×32; this ViT expects 32×32"):
        built("vit_ti-cifar")(torch.randn(1, 3, 28, 32))
