"""`build`: names of models, and errors."""

import sys
from types import ModuleType

import pytest
import torch
from torch import nn

from optg.models import build, explain_shape_errors, image_size_option


def add_fake_module(monkeypatch: pytest.MonkeyPatch, name: str, **contents: object) -> ModuleType:
    """Add a module that can be imported during one test."""
    module = ModuleType(name)
    vars(module).update(contents)
    monkeypatch.setitem(sys.modules, name, module)
    return module


def error_of(name: str, classes: int = 3) -> str:
    """Return the error of `build`, which is one line."""
    with pytest.raises(ValueError) as error:
        build(name, classes)
    assert "\n" not in str(error.value)
    return str(error.value)


def linear_layer(name: str = "", num_classes: int = 0) -> nn.Module:
    return nn.Linear(2, num_classes)


def test_models_of_torchvision(monkeypatch: pytest.MonkeyPatch) -> None:
    models = add_fake_module(monkeypatch, "torchvision.models", get_model=linear_layer)
    models.list_models = lambda module: {models: ["resnet18", "vgg11"]}[module]
    assert build("torchvision:resnet18", 3).out_features == 3
    assert error_of("torchvision:resnet19") == "torchvision has no classifier 'resnet19'; nearest: resnet18"
    assert error_of("torchvision:fcn") == "torchvision has no classifier 'fcn'"


def test_models_of_timm(monkeypatch: pytest.MonkeyPatch) -> None:
    add_fake_module(monkeypatch, "timm", create_model=linear_layer, list_models=lambda: ["resnet18", "vit_small_patch16_224"])
    assert build("timm:vit_small_patch16_224", 3).out_features == 3
    assert error_of("timm:vit_small_patch16") == "timm has no model 'vit_small_patch16'; nearest: vit_small_patch16_224"


@pytest.mark.parametrize(("package", "module"), [("timm", "timm"), ("torchvision", "torchvision.models")])
def test_a_missing_package_is_named_with_install_advice(monkeypatch: pytest.MonkeyPatch, package: str, module: str) -> None:
    monkeypatch.setitem(sys.modules, module, None)  # makes the import fail
    text = error_of(f"{package}:resnet18")
    assert text.startswith(f"cannot import '{module}' (") and f"pip install {package}" in text


def test_options_are_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def net(classes: int, width: int = 2) -> nn.Module:
        return nn.Linear(width, classes)

    add_fake_module(monkeypatch, "my.nets", net=net)
    assert build("my.nets:net", 3, {"width": 5}).in_features == 5
    with pytest.raises(ValueError, match=r"my.nets:net cannot be called with classes=3, wdth=5: got an unexpected keyword"):
        build("my.nets:net", 3, {"wdth": 5})
    assert not isinstance(build("vgg19", 10, {"fifth_maxpool": True}).features[-1], nn.ReLU)
    with pytest.raises(ValueError, match=r"^vgg19 cannot be built with depth=3: .*unexpected keyword argument 'depth'$"):
        build("vgg19", 10, {"depth": 3})
    with pytest.raises(ValueError, match="vgg19: the number of classes follows from the data; remove the option num_classes"):
        build("vgg19", 10, {"num_classes": 3})


@pytest.mark.parametrize(
    ("name", "option"), [("timm:vit_tiny_patch16_224", "img_size"), ("torchvision:vit_b_16", "image_size")]
)
def test_the_option_for_the_image_size_of_a_vision_transformer(torchvision: ModuleType, name: str, option: str) -> None:
    with torch.device("meta"):
        model = build(name, 10)
        assert image_size_option(name, model) == option
        assert build(name, 10, {option: 32})(torch.zeros(1, 3, 32, 32)).shape == (1, 10)
    with pytest.raises(ValueError, match=rf"^{name} does not take images of 3×32×32; advice \("):  # noqa: SIM117
        with explain_shape_errors(name, (3, 32, 32), "advice"):
            model(torch.zeros(1, 3, 32, 32, device="meta"))


def test_a_network_for_any_image_size_has_no_such_option(torchvision: ModuleType) -> None:
    assert not any(image_size_option(name, build(name, 10)) for name in ("timm:resnet18", "torchvision:resnet18", "resnet20"))


def test_models_of_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    def net(classes: int) -> nn.Module:
        return nn.Linear(2, classes)

    add_fake_module(monkeypatch, "my.nets", net=net, size=3, number=lambda classes: classes, small=lambda: nn.Linear(2, 2))
    assert build("my.nets:net", 3).out_features == 3
    assert error_of("my.nets:nett") == "the module 'my.nets' has no function 'nett'; nearest: net"
    assert error_of("my.nets:number") == "my.nets:number returned a value of type int; expected a torch.nn.Module"
    assert error_of("my.nets:size").startswith("my.nets:size cannot be called with classes=3: ")
    assert error_of("my.nets:small").startswith("my.nets:small cannot be called with classes=3: ")
    assert error_of("no_such_module:net") == (
        "cannot import 'no_such_module' (No module named 'no_such_module'); name your own model as package.module:function"
    )
    assert error_of(":net").startswith("cannot import ''")


def test_an_error_inside_a_users_function_is_not_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    add_fake_module(monkeypatch, "my.nets", net=lambda classes: nn.Linear(2, "3"))
    with pytest.raises(TypeError):
        build("my.nets:net", 3)


def test_unknown_names_are_refused_with_suggestions() -> None:
    assert error_of("resnet65").startswith("unknown model 'resnet65'; did you mean 'resnet56'? Known: digits, vgg19, ")
    assert error_of("torchvision").startswith("unknown model 'torchvision'; did you mean 'torchvision:NAME'? ")
    assert error_of("digits", classes=0) == "classes is 0; expected at least 1"


def test_shape_errors_are_explained() -> None:
    expected = "resnet20 does not take images of 1×8×8; give another --shape \\(.*expected input"
    with pytest.raises(ValueError, match=expected), explain_shape_errors("resnet20", (1, 8, 8), "give another --shape"):
        build("resnet20", 10)(torch.zeros(1, 1, 8, 8))


@pytest.mark.parametrize(
    ("name", "error"),
    [("my.nets:net", RuntimeError("a bug")), ("resnet20", torch.OutOfMemoryError("full")), ("digits", KeyError())],
)
def test_other_errors_are_not_changed(name: str, error: Exception) -> None:
    with pytest.raises(type(error)) as caught, explain_shape_errors(name, (1, 8, 8), ""):
        raise error
    assert caught.value is error
