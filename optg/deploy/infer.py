"""A trained model at work: on image files, or on the test images of its data. The zeros are skipped."""

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from rich.console import Console
from rich.markup import escape
from torch import Tensor

import optg
from optg import data as datasets
from optg.data import Data
from optg.deploy.export import Trained, load_data, open_trained
from optg.deploy.packed import About
from optg.training.recipe import Recipe

BATCH = 32


def infer(path: Path, images: list[Path], on_test: bool, folder: str | None, threads: int | None, console: Console) -> None:
    """What `optg run` does."""
    if bool(images) == on_test:
        raise ValueError("give image files, or --data test for the test images of the model's data; one of the two")
    if threads is not None and threads < 1:
        raise ValueError(f"--threads is {threads}; expected at least 1")
    trained = open_trained(path)
    if on_test:
        score(trained, data_of(trained, folder), threads, console)
    else:
        classify(trained, images, threads, console)


# ---- image files


def classify(trained: Trained, paths: list[Path], threads: int | None, console: Console) -> None:
    """Print the five likeliest classes of each image."""
    about = trained.about
    if about.mean is None or about.std is None:
        raise ValueError("it is not known how this model's images were normalised; use --data test, or optg.load in Python")
    for path in paths:
        if not path.is_file():
            raise FileNotFoundError(f"there is no image {path}")
    network = optg.compile(trained.model, trained.example, threads=threads)
    for path in paths:
        with torch.no_grad():
            shares = network(read(path, about)[None]).float().softmax(1)[0]
        console.print(f"[bold]{escape(str(path))}[/]", soft_wrap=True)
        for share, label in zip(*shares.topk(min(5, len(shares)))):
            text = about.labels[int(label)] if about.labels else f"class {int(label)}"
            console.print(f"  {float(share):7.2%}  {escape(text)}", highlight=False, soft_wrap=True)


def read(path: Path, about: About) -> Tensor:
    """An image file as the model was trained to see it: a square in the middle, resized, normalised."""
    channels, height, width = about.shape
    if channels not in (1, 3):
        raise ValueError(f"the model takes images of {channels} channels; an image file has 1 or 3")
    assert about.mean is not None and about.std is not None
    try:
        with Image.open(path) as image:
            if image.mode.startswith(("I", "F")):
                raise ValueError(f"its pixels have more than 8 bits a channel (mode {image.mode}); expected 8")
            side = about.centre * min(image.size)
            left, top = (image.width - side) / 2, (image.height - side) / 2
            box = (left, top, left + side, top + side)
            small = image.convert("L" if channels == 1 else "RGB").resize((width, height), Image.Resampling.BILINEAR, box)
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise ValueError(f"{path} cannot be read as an image: {error}") from None
    pixels = torch.from_numpy(np.array(small, dtype=np.float32)).reshape(height, width, channels).permute(2, 0, 1) / 255
    mean, std = (torch.tensor(values)[:, None, None] for values in (about.mean, about.std))
    return ((pixels - mean) / std).contiguous()


# ---- the test images


def data_of(trained: Trained, folder: str | None) -> Data:
    """The data the model was trained on. A file may name data of ours, but no function to be imported."""
    if trained.plan:
        settings = trained.plan.recipe
        return load_data(replace(settings, folder=folder or settings.folder), BATCH)
    wanted = str(trained.about.origin.get("data"))
    if wanted.partition(":")[0] not in datasets.DATASETS:
        raise ValueError(f"the file says that its data is {wanted!r}; expected one of {', '.join(datasets.DATASETS)}")
    return load_data(Recipe(data=wanted, folder=folder), BATCH)


def score(trained: Trained, data: Data, threads: int | None, console: Console) -> None:
    """Print the accuracy on the test images, and how many the engine computes in a second."""
    if tuple(data.shape) != tuple(trained.about.shape):
        raise ValueError(f"the data's images are {data.shape}; the model takes {trained.about.shape}")
    network = optg.compile(trained.model, trained.example.expand(BATCH, -1, -1, -1).contiguous(), threads=threads)
    right = seen = 0
    seconds = 0.0
    for images, labels in warmed(network, data.test()):
        start = time.perf_counter()
        outputs = network(images)
        seconds += time.perf_counter() - start
        right += int((outputs.argmax(1) == labels).sum())
        seen += len(labels)
    console.print(
        f"accuracy {right / seen:.2%}  ({seen:,} images, {seen / seconds:,.0f} a second in batches of {BATCH}, "
        f"{threads or 'all'} thread{'s' if threads != 1 else ''})",
        highlight=False,
        soft_wrap=True,
    )


def warmed(network: Callable[[Tensor], Any], batches: Iterable[tuple[Tensor, Tensor]]) -> Iterator[tuple[Tensor, Tensor]]:
    """The batches, the first of them once unseen: what is made at a first call does not count."""
    for index, (images, labels) in enumerate(batches):
        if index == 0:
            network(images)
        yield images, labels
