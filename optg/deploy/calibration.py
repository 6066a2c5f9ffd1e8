"""`optg export --values int8`: quantize a trained model, with the ranges of its training or calibrated on training images."""

from dataclasses import replace
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from optg.deploy.graph import Graph, capture, count_graph
from optg.deploy.packed import About
from optg.deploy.qat import quantized as quantized_like
from optg.deploy.quantize import quantize
from optg.training.recipe import Recipe
from optg.training.saved import SavedRun

IMAGES, BATCH = 512, 64


def quantized_graph(model: nn.Module, about: About, saved: SavedRun, folder: str | None) -> tuple[Graph, About]:
    """Return a run's model in int8, and its description, which says where the ranges of its activations come from.

    Args:
        saved: the run, or its checkpoint. If it was trained with --quantize, the ranges are those that training found.
        folder: of the dataset to calibrate on; by default the recipe's.
    """
    settings = saved.plan.recipe
    made: dict[str, Any] = {"values": "int8"}
    try:
        if settings.quantize and folder is None:
            quantized = quantized_like(model, torch.zeros(2, *about.shape), saved.ranges())
            made["ranges"] = "trained"
        else:
            images = calibration_images(replace(settings, folder=folder or settings.folder))
            quantized = quantize(model, images.split(BATCH))
            made |= {"calibration_images": len(images), "calibration_seed": settings.seed}
    except ImportError as error:
        raise ValueError(str(error)) from None
    graph = capture(quantized, torch.zeros(1, *about.shape))
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
