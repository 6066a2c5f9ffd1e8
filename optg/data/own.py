"""A user's own dataset: `package.module:function`, called with `folder=...`, returns ((images, labels), (images, labels)).

The first pair is for training, the second for testing. Images are [N, C, H, W]. uint8 images are normalised by mean and
standard deviation of each channel of the training images; float images are used as they are. Labels are int64 [N], from 0.
There is no augmentation, as the library cannot know which one keeps the labels right.
"""

import inspect
from importlib import import_module

import torch
from torch import Tensor

from optg.data.base import Data, Request
from optg.data.memory import InMemory, Split, Tensors
from optg.naming import nearest
from optg.trust import refuse_borrowed, refuse_untrusted


def serve(request: Request) -> Data:
    refuse_untrusted(request.name)
    module, _, function = request.name.partition(":")
    try:
        found = import_module(module)
    except ImportError as error:
        raise ValueError(f"cannot import {module!r} ({error}); name your own dataset as package.module:function") from error
    if not callable(make := getattr(found, function, None)):
        public = [name for name, value in vars(found).items() if callable(value) and not name.startswith("_")]
        raise ValueError(f"the module {module!r} has no function {function!r}; {nearest(function, public)}")
    refuse_borrowed(request.name, make)
    try:
        inspect.signature(make).bind(folder=request.folder)  # a TypeError raised inside the function is shown as it is
    except TypeError as error:
        raise ValueError(f"{request.name} cannot be called with folder={str(request.folder)!r}: {error}") from error
    train, test = check_splits(request.name, make(folder=request.folder))
    classes = int(train[1].max()) + 1
    if (highest := int(test[1].max())) >= classes:
        raise ValueError(f"{request.name}: a test label is {highest}; the training labels end at {classes - 1}")
    if train[0].dtype == torch.uint8:
        return InMemory(request, Tensors(train, test, classes, *statistics(train[0]), sorted=True))
    return InMemory(request, Tensors(train, test, classes, sorted=True))


def check_splits(name: str, returned: object) -> tuple[Split, Split]:
    match returned:
        case ((Tensor() as train_images, Tensor() as train_labels), (Tensor() as test_images, Tensor() as test_labels)):
            train, test = (train_images, train_labels), (test_images, test_labels)
        case _:
            raise ValueError(
                f"{name} returned {describe_value(returned)}; expected ((images, labels), (images, labels)) of tensors"
            )
    for part, (images, labels) in (("training", train), ("test", test)):
        if images.ndim != 4 or not len(images) or not (images.dtype == torch.uint8 or images.is_floating_point()):
            raise ValueError(f"{name}: the {part} images are {describe_value(images)}; expected uint8 or float [N, C, H, W]")
        if labels.dtype != torch.int64 or labels.shape != images.shape[:1]:
            raise ValueError(
                f"{name}: the {part} labels are {describe_value(labels)}; expected int64 [{len(images)}], one per image"
            )
        if labels.min() < 0:
            raise ValueError(f"{name}: a {part} label is {int(labels.min())}; expected 0 or more")
    if train[0].shape[1:] != test[0].shape[1:] or train[0].dtype != test[0].dtype:
        kinds = f"training images are {describe_value(train[0])}, test images {describe_value(test[0])}"
        raise ValueError(f"{name}: {kinds}; make shape and type the same")
    return train, test


def describe_value(value: object) -> str:
    if isinstance(value, Tensor):
        return f"{value.dtype} {list(value.shape)}".removeprefix("torch.")
    return f"a {type(value).__name__}"


def statistics(images: Tensor) -> tuple[list[float], list[float]]:
    """Return mean and standard deviation of each channel of uint8 images: exact, from histograms, without a copy as floats."""
    counts = torch.stack([channel.flatten().bincount(minlength=256) for channel in images.unbind(1)]).double()
    shares, values = counts / counts.sum(1, keepdim=True), torch.arange(256, dtype=torch.float64, device=images.device)
    mean = shares @ values
    std = (shares @ values.square() - mean.square()).clamp(min=0).sqrt()
    return mean.tolist(), torch.where(std > 0, std, 1.0).tolist()  # a constant channel is not divided
