"""Run a trained model on image files or on the test images of its dataset, skipping the zeros."""

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

import optg
from optg.deploy.export import Trained, load_data, open_trained
from optg.deploy.packed import About
from optg.training.recipe import Recipe

if TYPE_CHECKING:
    from rich.console import Console

    from optg.data import Data

BATCH = 32


def predict(path: Path, images: list[Path], on_test: bool, folder: str | None, threads: int | None, console: "Console") -> None:
    """Carry out `optg predict`: classify image files, or print the accuracy on the test images."""
    if bool(images) == on_test:
        raise ValueError("give either image files, or --data test for the test images of the model's dataset")
    if threads is not None and threads < 1:
        raise ValueError(f"--threads is {threads}; expected at least 1")
    trained = open_trained(path)
    if on_test:
        print_accuracy(trained, open_dataset(trained, folder), threads, console)
    else:
        print_classes(trained, images, threads, console)


def print_classes(trained: Trained, paths: list[Path], threads: int | None, console: "Console") -> None:
    """Print the five most likely classes of each image."""
    about = trained.about
    if about.mean is None or about.std is None:
        raise ValueError("the normalisation of this model's images is unknown; use --data test, or optg.load in Python")
    for path in paths:
        if not path.is_file():
            missing = f"{path} is not a file; expected an image" if path.exists() else f"there is no image {path}"
            raise FileNotFoundError(missing)
    network = optg.compile(trained.model, trained.example, threads=threads)
    for path in paths:
        with torch.no_grad():
            probabilities = network(read_normalised_image(path, about)[None]).float().softmax(1)[0]
        console.print(str(path), style="bold", soft_wrap=True)
        for probability, label in zip(*probabilities.topk(min(5, len(probabilities)))):
            text = about.labels[int(label)] if about.labels else f"class {int(label)}"
            console.print(f"  {float(probability):7.2%}  {text}", highlight=False, soft_wrap=True)


def read_normalised_image(path: Path, about: About) -> Tensor:
    """Read an image file, then crop, resize and normalise it as in training."""
    from PIL import Image

    from optg.data.images import open_image

    channels, height, width = about.shape
    if channels not in (1, 3):
        raise ValueError(f"the model takes images of {channels} channels; an image file has 1 or 3")
    assert about.mean is not None and about.std is not None
    try:
        with open_image(path) as image:
            if image.mode.startswith(("I", "F")):
                raise ValueError(f"it has more than 8 bits per channel (mode {image.mode}); expected 8")
            side = about.centre * min(image.size)
            left, top = (image.width - side) / 2, (image.height - side) / 2
            box = (left, top, left + side, top + side)
            small = image.convert("L" if channels == 1 else "RGB").resize((width, height), Image.Resampling.BILINEAR, box)
    except (OSError, ValueError, SyntaxError) as error:
        raise ValueError(f"{path} cannot be read as an image: {error}") from None
    pixels = torch.from_numpy(np.array(small, dtype=np.float32)).reshape(height, width, channels).permute(2, 0, 1) / 255
    mean, std = (torch.tensor(values)[:, None, None] for values in (about.mean, about.std))
    return ((pixels - mean) / std).contiguous()


def open_dataset(trained: Trained, folder: str | None) -> "Data":
    """Open the dataset the model was trained on. A packed file may name a built-in dataset, but no function to import."""
    from optg.data import DATASETS

    if trained.plan:
        settings = trained.plan.recipe
        return load_data(replace(settings, folder=folder or settings.folder), BATCH)
    name = str(trained.about.origin.get("data"))
    if name.partition(":")[0] not in DATASETS:
        raise ValueError(f"the file names the dataset {name!r}; expected one of {', '.join(DATASETS)}")
    return load_data(Recipe(data=name, folder=folder), BATCH)


def print_accuracy(trained: Trained, data: "Data", threads: int | None, console: "Console") -> None:
    """Print the accuracy on the test images and the engine's images per second."""
    if tuple(data.shape) != tuple(trained.about.shape):
        raise ValueError(f"the dataset's images are {data.shape}; the model takes {trained.about.shape}")
    network = optg.compile(trained.model, trained.example.expand(BATCH, -1, -1, -1).contiguous(), threads=threads)
    correct = seen = 0
    seconds = 0.0
    for images, labels in after_warm_up(network, data.test()):
        start = time.perf_counter()
        outputs = network(images)
        seconds += time.perf_counter() - start
        correct += int((outputs.argmax(1) == labels).sum())
        seen += len(labels)
    console.print(
        f"accuracy {correct / seen:.2%}  ({seen:,} images, {seen / seconds:,.0f} per second in batches of {BATCH}, "
        f"{threads or 'all'} thread{'s' if threads != 1 else ''})",
        highlight=False,
        soft_wrap=True,
    )


def after_warm_up(
    network: Callable[[Tensor], Any], batches: Iterable[tuple[Tensor, Tensor]]
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the batches, after running the first one once so that one-time work of a first call is not timed."""
    for index, (images, labels) in enumerate(batches):
        if index == 0:
            network(images)
        yield images, labels
