"""The models: sizes and FLOPs as the papers print them, one step of training, and the messages of `build`."""

import math
import sys
from collections.abc import Callable
from functools import cache, partial
from types import ModuleType
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
    shape: tuple[int, int, int]  # of one image
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
    "resnet50-cifar": Row(CIFAR, 10, 23_520_842, 1_297_829_888, 23_467_712),
    "vit_ti-cifar": Row(CIFAR, 10, 5_362_762, 345_638_784, 5_319_552),
    "resnet50": Row(IMAGENET, 1000, 25_557_032, 4_089_184_256, 25_502_912),  # 25.6M, 4.09G
    "mobilenet_v1": Row(IMAGENET, 1000, 4_231_976, 568_740_352, 4_209_088),  # Howard et al.: 4.2M, 569M; OptG's: 4.12M
    "vit_s": Row(IMAGENET, 1000, 22_050_664, 4_241_218_560, 21_912_576),  # DeiT-S: 22M; 4.6G with attention's own products
}
SMALL = ("digits", "vgg19", "resnet20", "mobilenet_v1", "vit_ti-cifar")  # one of each family


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


@cache
def model(name: str) -> nn.Module:
    """Built once for all tests that leave its weights alone."""
    return build(name, TABLE[name].classes)


def images(name: str, batch: int) -> Tensor:
    """Where the network takes images of any size, small ones."""
    channels, height, width = TABLE[name].shape
    if (height, width) == (224, 224) and name != "vit_s":
        height = width = 64
    return torch.randn(batch, channels, height, width)


def test_the_table_has_every_model() -> None:
    assert list(TABLE) == list(MODELS)


@pytest.mark.parametrize("name", TABLE)
def test_size(name: str) -> None:
    row = TABLE[name]
    account = count(model(name), torch.randn(1, *row.shape))
    assert (account.parameters, account.dense_flops) == (row.parameters, row.flops)
    prunable = find_prunable(model(name), None, ())
    assert sum(p.numel() for p in prunable.values()) == row.prunable
    assert {layer.name.split("[")[0] for layer in account.layers} == set(prunable)


@pytest.mark.parametrize("name", TABLE)
def test_forward_and_backward(name: str) -> None:
    net, batch = model(name).train(), images(name, 2)
    output = net(batch)
    assert output.shape == (2, TABLE[name].classes) and output.isfinite().all()
    nn.functional.cross_entropy(output, torch.tensor([0, 1])).backward()
    grads = {n: p.grad for n, p in net.named_parameters()}
    net.zero_grad(set_to_none=True)
    assert all(g is not None and g.isfinite().all() and g.any() for g in grads.values())


@pytest.mark.parametrize("name", TABLE)
def test_channels_last(name: str) -> None:
    net, batch = model(name).eval(), images(name, 1)
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


# Few layers of the deepest networks: tracing takes its time, and their layers are all alike.
GRAPHS = {
    "digits": (partial(model, "digits"), DIGITS, True),
    "vgg19": (partial(model, "vgg19"), CIFAR, True),
    "resnet20": (partial(model, "resnet20"), CIFAR, True),
    "mobilenet_v1": (partial(model, "mobilenet_v1"), CIFAR, True),
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


@pytest.mark.parametrize("name", SMALL)
def test_a_sparse_step(name: str) -> None:
    net, row = build(name, TABLE[name].classes), TABLE[name]
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
    sparsifier = optg.sparsify(net, optimizer, sparsity=0.5, epochs=2, steps_per_epoch=1)
    step(net, optimizer, (images(name, 4), torch.arange(4)))
    masks = sparsifier.masks
    assert sum(mask.numel() for mask in masks.values()) == row.prunable
    assert sum(int((~mask).sum()) for mask in masks.values()) == math.ceil(0.5 * row.prunable)
    assert all(not net.get_parameter(n)[~mask].any() for n, mask in masks.items())


@pytest.mark.parametrize("name", TABLE)
def test_classes(name: str) -> None:
    with torch.device("meta"):
        net = build(name, 7)
        assert net.train()(torch.empty(2, *TABLE[name].shape)).shape == (2, 7)


# ---- what makes each network the one of its paper


def test_vgg_pools_its_last_pixels_by_average_or_maximum() -> None:
    average, maximum = model("vgg19"), model("vgg19-maxpool")
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
def test_convolutions_start_at_kaimings_scale(name: str, layer: str, fan: int) -> None:
    weight = model(name).get_submodule(layer).weight
    assert weight.std().item() == pytest.approx(math.sqrt(2 / fan), rel=0.05)


def test_encoder_layers_start_apart() -> None:
    first, second = (block.linear1.weight for block in model("vit_ti-cifar").blocks[:2])
    assert first.std().item() == pytest.approx(0.02, rel=0.05) and not torch.equal(first, second)


def test_the_shortcut_of_small_resnets_has_no_parameters() -> None:
    block = model("resnet20").layer2[0].eval()
    x = torch.rand(1, 16, 4, 4)
    nn.init.zeros_(block.bn2.weight)  # only the shortcut is left
    y = block(x)
    nn.init.ones_(block.bn2.weight)
    assert torch.equal(y[:, :16], x[:, :, ::2, ::2]) and not y[:, 16:].any()


def test_resnet50_has_torchvisions_names() -> None:
    names = model("resnet50").state_dict()
    assert len(names) == 320  # as torchvision's
    assert names["conv1.weight"].shape == (64, 3, 7, 7)
    assert names["layer2.0.conv2.weight"].shape == (128, 128, 3, 3)
    assert names["layer4.0.downsample.0.weight"].shape == (2048, 1024, 1, 1)
    assert names["layer4.2.bn3.running_var"].shape == (2048,)
    assert names["fc.bias"].shape == (1000,)
    assert model("resnet50").layer2[0].conv2.stride == (2, 2)


def test_depth_of_small_resnets() -> None:
    with pytest.raises(ValueError, match="depth is 21; expected 6n \\+ 2"):
        resnet_cifar(21)


def test_vit_refuses_images_of_another_size() -> None:
    with pytest.raises(ValueError, match="images are 28×32; this ViT expects 32×32"):
        model("vit_ti-cifar")(torch.randn(1, 3, 28, 32))


# ---- models from elsewhere


def fake(monkeypatch: pytest.MonkeyPatch, name: str, **contents: object) -> ModuleType:
    """A module that can be imported during one test."""
    module = ModuleType(name)
    vars(module).update(contents)
    monkeypatch.setitem(sys.modules, name, module)
    return module


def message(name: str, classes: int = 3) -> str:
    """Of the error; it is one line."""
    with pytest.raises(ValueError) as error:
        build(name, classes)
    assert "\n" not in str(error.value)
    return str(error.value)


def linear(name: str = "", num_classes: int = 0) -> nn.Module:
    return nn.Linear(2, num_classes)


def test_torchvision(monkeypatch: pytest.MonkeyPatch) -> None:
    models = fake(monkeypatch, "torchvision.models", get_model=linear)
    models.list_models = lambda module: {models: ["resnet18", "vgg11"]}[module]
    assert build("torchvision:resnet18", 3).out_features == 3
    assert message("torchvision:resnet19") == "torchvision has no classifier 'resnet19'; nearest: resnet18"
    assert message("torchvision:fcn") == "torchvision has no classifier 'fcn'"


def test_timm(monkeypatch: pytest.MonkeyPatch) -> None:
    fake(monkeypatch, "timm", create_model=linear, list_models=lambda: ["resnet18", "vit_small_patch16_224"])
    assert build("timm:vit_small_patch16_224", 3).out_features == 3
    assert message("timm:vit_small_patch16") == "timm has no model 'vit_small_patch16'; nearest: vit_small_patch16_224"


@pytest.mark.parametrize(("package", "module"), [("timm", "timm"), ("torchvision", "torchvision.models")])
def test_a_package_that_is_not_installed(monkeypatch: pytest.MonkeyPatch, package: str, module: str) -> None:
    monkeypatch.setitem(sys.modules, module, None)  # Python's own way to say that there is none
    text = message(f"{package}:resnet18")
    assert text.startswith(f"cannot import '{module}' (") and f"pip install {package}" in text


def test_ones_own(monkeypatch: pytest.MonkeyPatch) -> None:
    def net(classes: int) -> nn.Module:
        return nn.Linear(2, classes)

    fake(monkeypatch, "my.nets", net=net, size=3, number=lambda classes: classes, small=lambda: nn.Linear(2, 2))
    assert build("my.nets:net", 3).out_features == 3
    assert message("my.nets:nett") == "the module 'my.nets' has no function 'nett'; nearest: net"
    assert message("my.nets:number") == "my.nets:number returned a value of type int; expected a torch.nn.Module"
    assert message("my.nets:size").startswith("my.nets:size cannot be called with classes=3: ")
    assert message("my.nets:small").startswith("my.nets:small cannot be called with classes=3: ")
    assert message("no_such_module:net") == (
        "cannot import 'no_such_module' (No module named 'no_such_module'); "
        "a model of your own is named as package.module:function"
    )
    assert message(":net").startswith("cannot import ''")


def test_an_error_inside_ones_own_function_is_shown_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    fake(monkeypatch, "my.nets", net=lambda classes: nn.Linear(2, "3"))
    with pytest.raises(TypeError):
        build("my.nets:net", 3)


def test_unknown_names() -> None:
    assert message("resnet65").startswith("unknown model 'resnet65'; did you mean 'resnet56'? Known: digits, vgg19, ")
    assert message("torchvision").startswith("unknown model 'torchvision'; did you mean 'torchvision:NAME'? ")
    assert message("digits", classes=0) == "classes is 0; expected at least 1"
