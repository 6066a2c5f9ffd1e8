"""The models, by the name a user gives. This dict is the only registry: adding a model is one function and one line here.

A model is a function of the number of classes that returns a plain `nn.Module`. Beside those of the registry, `build` takes

    torchvision:NAME, timm:NAME     a model of these packages, where they are installed
    package.module:function         one's own, called with `classes=...`
"""

import difflib
import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from types import ModuleType

from torch import OutOfMemoryError, nn

from optg.models.digits import digits
from optg.models.mobilenet import mobilenet_v1
from optg.models.resnet import resnet50, resnet_cifar
from optg.models.vgg import vgg19
from optg.models.vit import vit_s, vit_ti_cifar
from optg.naming import nearest

MODELS: dict[str, Callable[..., nn.Module]] = {
    "digits": digits,
    "vgg19": vgg19,
    "vgg19-maxpool": partial(vgg19, fifth_maxpool=True),
    "resnet20": partial(resnet_cifar, 20),
    "resnet32": partial(resnet_cifar, 32),
    "resnet44": partial(resnet_cifar, 44),
    "resnet56": partial(resnet_cifar, 56),
    "resnet110": partial(resnet_cifar, 110),
    "resnet50-cifar": partial(resnet50, small_images=True),
    "vit_ti-cifar": vit_ti_cifar,
    "resnet50": resnet50,
    "mobilenet_v1": mobilenet_v1,
    "vit_s": vit_s,
}

ELSEWHERE = ("torchvision:NAME", "timm:NAME", "package.module:function")

__all__ = ["ELSEWHERE", "MODELS", "build", "explain_shape_errors", "small_images"]


@contextmanager
def explain_shape_errors(name: str, shape: Sequence[int], advice: str) -> Iterator[None]:
    """Turn an error that a model raises for images of this shape into one that names both, and ends with advice."""
    try:
        yield
    except OutOfMemoryError:
        raise  # unrelated to the shape
    except (RuntimeError, ValueError) as error:
        if name not in MODELS and not name.startswith(("torchvision:", "timm:")):
            raise  # a user's own model: its traceback shows where it failed
        size, reason = "×".join(map(str, shape)), next(iter(str(error).splitlines()), "")
        raise ValueError(f"{name} does not take images of {size}; {advice} ({reason})") from error


def small_images(name: str) -> tuple[int, int, int]:
    """The shape of images that a model is looked at with, where it is not ImageNet's."""
    return (1, 8, 8) if name == "digits" else (3, 32, 32)


def build(name: str, classes: int) -> nn.Module:
    """The model of that name, with random weights, for so many classes."""
    if classes < 1:
        raise ValueError(f"classes is {classes}; expected at least 1")
    if name in MODELS:
        return MODELS[name](classes=classes)
    source, colon, inner = name.partition(":")
    if not colon:
        raise ValueError(f"unknown model {name!r}; {nearest(name, [*MODELS, *ELSEWHERE])}")
    if source == "torchvision":
        return from_torchvision(inner, classes)
    if source == "timm":
        return from_timm(inner, classes)
    return from_function(source, inner, classes)


def from_torchvision(name: str, classes: int) -> nn.Module:
    models = load("torchvision.models", "install it with: pip install torchvision, in the version for your torch")
    # Only classifiers are listed so. The builders of detectors would download weights for their backbone.
    if name not in (known := models.list_models(module=models)):
        raise ValueError(f"torchvision has no classifier {name!r}{closest(name, known)}")
    return models.get_model(name, num_classes=classes)


def from_timm(name: str, classes: int) -> nn.Module:
    timm = load("timm", "install it with: pip install timm")
    if name not in (known := timm.list_models()):
        raise ValueError(f"timm has no model {name!r}{closest(name, known)}")
    return timm.create_model(name, num_classes=classes)


def from_function(module: str, function: str, classes: int) -> nn.Module:
    """A user's own model."""
    found = load(module, "a model of your own is named as package.module:function")
    if not hasattr(found, function):
        raise ValueError(f"the module {module!r} has no function {function!r}{closest(function, vars(found))}")
    make = getattr(found, function)
    try:
        inspect.signature(make).bind(classes=classes)  # not the call itself: a TypeError inside it is the user's to see
    except TypeError as error:
        raise ValueError(f"{module}:{function} cannot be called with classes={classes}: {error}") from error
    model = make(classes=classes)
    if not isinstance(model, nn.Module):
        raise ValueError(f"{module}:{function} returned a value of type {type(model).__name__}; expected a torch.nn.Module")
    return model


def load(module: str, advice: str) -> ModuleType:
    try:
        return import_module(module)
    except Exception as error:  # not only ImportError: a torchvision made for another torch fails in ways of its own
        raise ValueError(f"cannot import {module!r} ({error}); {advice}") from error


def closest(name: str, known: Iterable[str]) -> str:
    """A hint like `nearest`, where there are too many known names to show them all."""
    close = difflib.get_close_matches(name, known)
    return f"; nearest: {', '.join(close)}" if close else ""
