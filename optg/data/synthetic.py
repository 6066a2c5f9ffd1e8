"""Random images with random labels, made on the device: for benchmarks and trials without data.

`synthetic` has 2,048 training images of 3×32×32 in 10 classes; `synthetic:3x224x224:1000:1024` gives shape, classes and
number of training images. There are a quarter as many test images.
"""

import re

import torch

from optg.data.base import Data, Request
from optg.data.memory import InMemory, Split, Tensors

DEFAULT = "synthetic:3x32x32:10:2048"
MEAN, STD = 127.5, 73.9  # mean and deviation of uniformly distributed bytes


def serve(request: Request) -> Data:
    name = DEFAULT if request.name == "synthetic" else request.name
    match = re.fullmatch(r"synthetic:(\d+)x(\d+)x(\d+):(\d+):(\d+)", name)
    channels, height, width, classes, count = map(int, match.groups()) if match else (0,) * 5
    if 0 in (channels, height, width, classes, count):
        raise ValueError(f"unknown dataset {name!r}; expected synthetic:SHAPE:CLASSES:IMAGES, such as {DEFAULT}")
    random = torch.Generator(request.device).manual_seed(0)

    def split(count: int) -> Split:
        shape = (count, channels, height, width)
        images = torch.randint(256, shape, dtype=torch.uint8, device=request.device, generator=random)
        return images, torch.randint(classes, (count,), device=request.device, generator=random)

    return InMemory(request, Tensors(split(count), split(max(1, count // 4)), classes, [MEAN] * channels, [STD] * channels))
