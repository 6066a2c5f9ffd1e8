"""Models by name. `MODELS` is the only registry: to add a model, write one function and add one line here.

A model is a function from the number of classes to a plain `nn.Module`. Besides the names in the registry, `build` accepts

    torchvision:NAME, timm:NAME     a model of one of these packages, if it is installed
    package.module:function         your own function, called with `classes=...`, if `optg.trust` allows its import

Options are passed on to the model's function as keyword arguments.
"""

import difflib
import inspect
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from types import ModuleType
from typing import Any

from torch import OutOfMemoryError, nn

from optg.models.digits import digits
from optg.models.mobilenet import mobilenet_v1
from optg.models.resnet import resnet18, resnet50, resnet_cifar
from optg.models.vgg import vgg19
from optg.models.vit import vit_s, vit_ti_cifar
from optg.naming import nearest
from optg.trust import refuse_borrowed, refuse_untrusted, trusts_everything

MODELS: dict[str, Callable[..., nn.Module]] = {
    "digits": digits,
    "vgg19": vgg19,
    "vgg19-maxpool": partial(vgg19, fifth_maxpool=True),
    "resnet20": partial(resnet_cifar, 20),
    "resnet32": partial(resnet_cifar, 32),
    "resnet44": partial(resnet_cifar, 44),
    "resnet56": partial(resnet_cifar, 56),
    "resnet110": partial(resnet_cifar, 110),
    "resnet18-cifar": partial(resnet18, small_images=True),
    "resnet50-cifar": partial(resnet50, small_images=True),
    "mobilenet_v1-cifar": partial(mobilenet_v1, small_images=True),
    "vit_ti-cifar": vit_ti_cifar,
    "resnet18": resnet18,
    "resnet50": resnet50,
    "mobilenet_v1": mobilenet_v1,
    "vit_s": vit_s,
}

WEIGHTS_ONLY = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"  # torch's environment variable
ELSEWHERE = ("torchvision:NAME", "timm:NAME", "package.module:function")

__all__ = ["ELSEWHERE", "MODELS", "advise_on_size", "build", "explain_shape_errors", "image_size_option", "small_images"]


@contextmanager
def explain_shape_errors(name: str, shape: Sequence[int], advice: str) -> Iterator[None]:
    """Turn errors of a forward pass into one that says that the model does not accept this image shape, with advice."""
    try:
        yield
    except OutOfMemoryError:
        raise  # unrelated to the shape
    except (RuntimeError, ValueError, AssertionError) as error:
        if name not in MODELS and not name.startswith(("torchvision:", "timm:")):
            raise  # in a model of their own, users need to see where it fails
        size, reason = "×".join(map(str, shape)), next(iter(str(error).splitlines()), "")
        raise ValueError(f"{name} does not take images of {size}; {advice} ({reason})") from error


def small_images(name: str) -> tuple[int, int, int]:
    """Return the image shape of a model for small images: channels, height, width."""
    return (1, 8, 8) if name == "digits" else (3, 32, 32)


def image_size_option(name: str, model: nn.Module) -> str | None:
    """Return the option that sets the image size of a model which accepts a single size, such as a vision transformer."""
    if name.startswith("timm:") and getattr(model, "default_cfg", {}).get("fixed_input_size"):
        return "img_size"
    return "image_size" if name.startswith("torchvision:") and hasattr(model, "image_size") else None


def advise_on_size(name: str, model: nn.Module, shape: Sequence[int], advice: str) -> str:
    """Return advice for a model that does not accept these images, with its option for the image size if it has one."""
    option = image_size_option(name, model)
    return f"give --model.{option.replace('_', '-')} {shape[-1]}, or {advice}" if option else advice


def build(name: str, classes: int, options: Mapping[str, Any] | None = None) -> nn.Module:
    """Build a model by name, with random weights and the given options."""
    options = options or {}
    if classes < 1:
        raise ValueError(f"classes is {classes}; expected at least 1")
    for key in ("classes", "num_classes"):
        if key in options:
            raise ValueError(f"{name}: the number of classes follows from the data; remove the option {key}")
    source, colon, inner = name.partition(":")
    if name not in MODELS and not colon:
        raise ValueError(f"unknown model {name!r}; {nearest(name, [*MODELS, *ELSEWHERE])}")
    if name in MODELS:
        make: Callable[..., nn.Module] = partial(MODELS[name], classes=classes)
    elif source == "torchvision":
        make = from_torchvision(inner, classes)
    elif source == "timm":
        make = from_timm(inner, classes)
    else:
        return from_function(source, inner, classes, options)
    try:
        with refuse_pickled_code():  # an option such as checkpoint_path names a file to load
            return make(**options)
    except Exception as error:
        if not options:
            raise
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise ValueError(f"{name} cannot be built with {as_arguments(options)}: {reason}") from error


@contextmanager
def refuse_pickled_code() -> Iterator[None]:
    """Let torch.load read only tensors and plain values, unless the user trusts everything."""
    before = os.environ.get(WEIGHTS_ONLY)
    if not trusts_everything():
        os.environ[WEIGHTS_ONLY] = "1"
    try:
        yield
    finally:
        os.environ.pop(WEIGHTS_ONLY, None)
        if before is not None:
            os.environ[WEIGHTS_ONLY] = before


def from_torchvision(name: str, classes: int) -> Callable[..., nn.Module]:
    models = import_or_advise("torchvision.models", "install the version for your torch with: pip install torchvision")
    # Lists classifiers only. The builders of detectors would download weights for their backbone.
    if name not in (known := models.list_models(module=models)):
        raise ValueError(f"torchvision has no classifier {name!r}{suggest(name, known)}")
    return partial(models.get_model, name, num_classes=classes)


def from_timm(name: str, classes: int) -> Callable[..., nn.Module]:
    timm = import_or_advise("timm", "install it, and the torchvision for your torch, with: pip install timm torchvision")
    if name not in (known := timm.list_models()):
        raise ValueError(f"timm has no model {name!r}{suggest(name, known)}")
    return partial(timm.create_model, name, num_classes=classes)


def from_function(module: str, function: str, classes: int, options: Mapping[str, Any]) -> nn.Module:
    """Build a user's own model."""
    refuse_untrusted(f"{module}:{function}")
    found = import_or_advise(module, "name your own model as package.module:function")
    if not hasattr(found, function):
        raise ValueError(f"the module {module!r} has no function {function!r}{suggest(function, vars(found))}")
    make = getattr(found, function)
    refuse_borrowed(f"{module}:{function}", make)
    try:
        inspect.signature(make).bind(classes=classes, **options)  # a TypeError raised inside the function is shown as it is
    except TypeError as error:
        given = as_arguments({"classes": classes, **options})
        raise ValueError(f"{module}:{function} cannot be called with {given}: {error}") from error
    model = make(classes=classes, **options)
    if not isinstance(model, nn.Module):
        raise ValueError(f"{module}:{function} returned a value of type {type(model).__name__}; expected a torch.nn.Module")
    return model


def as_arguments(options: Mapping[str, Any]) -> str:
    """Return options as a call's keyword arguments, for messages."""
    return ", ".join(f"{key}={value!r}" for key, value in options.items())


def import_or_advise(module: str, advice: str) -> ModuleType:
    try:
        return import_module(module)
    except Exception as error:  # a torchvision built for another torch can raise anything
        raise ValueError(f"cannot import {module!r} ({error}); {advice}") from error


def suggest(name: str, known: Iterable[str]) -> str:
    """Return the closest known names as a hint, where there are too many to list as `nearest` does."""
    close = difflib.get_close_matches(name, known)
    return f"; nearest: {', '.join(close)}" if close else ""
