"""`optg export --values int8`: quantize a trained model, calibrated on training images of its run."""

from dataclasses import replace
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from optg.deploy.graph import Graph, capture, count_graph
from optg.deploy.packed import About
from optg.deploy.quantize import quantize
from optg.training.recipe import Recipe

IMAGES, BATCH = 512, 64


def quantized_graph(model: nn.Module, about: About, settings: Recipe, folder: str | None) -> tuple[Graph, About]:
    """Return the model in int8, and its description with the number of images and the seed of the calibration.

    Args:
        settings: the recipe of the run.
        folder: of the dataset; by default the recipe's.
    """
    images = calibration_images(replace(settings, folder=folder or settings.folder))
    try:
        quantized = quantize(model, images.split(BATCH))
    except ImportError as error:
        raise ValueError(str(error)) from None
    graph = capture(quantized, images[:1])
    made: dict[str, Any] = {"values": "int8", "calibration_images": len(images), "calibration_seed": settings.seed}
    return graph, replace(about, account=count_graph(graph), origin={**about.origin, **made})


def calibration_images(settings: Recipe) -> Tensor:
    """Return the first training images in the order of the run's seed, transformed as for evaluation."""
    from optg import data as datasets  # not at the top: imagenet needs pillow

    try:
        data = datasets.load(
            settings.data, settings.folder, batch_size=1, device="cpu", seed=settings.seed, augment=False,
            validate=settings.validate,
        )  # fmt: skip
    except OSError as error:
        raise FileNotFoundError(f"int8 is calibrated on {IMAGES} training images: {error}; or give their --folder") from None
    return torch.cat([images for images, _ in islice(data.train(0), IMAGES)])
