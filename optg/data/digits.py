"""Handwritten digits of 8×8 pixels: real images, small enough to come with the library. digits.md names their source.

The split is fixed: NumPy's RandomState(0), whose stream never changes, permutes the 1,797 images. The first 1,437 are for
training, the last 360 for testing. Images by the same writer are in both parts.
"""

import gzip
from importlib.resources import files

import numpy as np
import torch
from torch import Tensor

from optg.data.base import Data, Request
from optg.data.memory import InMemory, Tensors

TRAIN_SIZE = 1437
MEAN, STD = 4.8863, 6.0138  # over the pixels (0 to 16) of the training images

Split = tuple[Tensor, Tensor]  # images [N, 1, 8, 8] with about zero mean and unit variance, float32; labels [N], int64


def load() -> tuple[Split, Split]:
    """Return normalised images and labels for training, and for testing."""
    (train_images, train_labels), (test_images, test_labels) = read()
    return ((train_images - MEAN) / STD, train_labels), ((test_images - MEAN) / STD, test_labels)


def read() -> tuple[Split, Split]:
    """Return the same splits with the original pixels: uint8, 0 to 16."""
    with files("optg.data").joinpath("digits.csv.gz").open("rb") as file, gzip.open(file, "rt") as lines:
        table = torch.from_numpy(np.loadtxt(lines, delimiter=",", dtype=np.uint8))
    table = table[np.random.RandomState(0).permutation(len(table))]
    images, labels = table[:, :64].reshape(-1, 1, 8, 8), table[:, 64].long()
    return (images[:TRAIN_SIZE], labels[:TRAIN_SIZE]), (images[TRAIN_SIZE:], labels[TRAIN_SIZE:])


def serve(request: Request) -> Data:
    return InMemory(request, Tensors(*read(), classes=10, mean=[MEAN], std=[STD]))
