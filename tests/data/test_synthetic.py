from pathlib import Path

import torch

from tests.data.small_data import load_small


def test_synthetic_shapes() -> None:
    data = load_small(Path(), "synthetic:1x6x5:3:40")
    assert (data.shape, data.classes, data.sizes) == ((1, 6, 5), 3, (40, 10))
    images = torch.cat([images for images, _ in load_small(Path(), "synthetic").train(0)])
    assert abs(images.mean().item()) < 0.01 and abs(images.std().item() - 1) < 0.01
