"""`optg.data.memory`: order, augmentation, and batches on a GPU."""

from pathlib import Path

import pytest
import torch

from optg.data.augment import crop_and_flip, normalise
from tests.data.small_data import load_small


def test_an_epoch_has_each_image_once(small_cifars: Path) -> None:
    data = load_small(small_cifars, "cifar10", batch_size=20, augment=False)
    seen = torch.cat([images for images, _ in data.train(0)])
    stored = normalise(data.images, data.mean, data.std)
    assert sorted(seen.sum((1, 2, 3)).tolist()) == sorted(stored.sum((1, 2, 3)).tolist())


def test_all_crops_and_flips_are_equally_likely(small_cifars: Path) -> None:
    data = load_small(small_cifars, "cifar10")
    _, top, left, flip = (torch.cat(drawn) for drawn in zip(*(data.draw(epoch) for epoch in range(200))))  # 20,000 images
    for offset in (top, left):
        counts = offset.bincount(minlength=9)
        assert len(counts) == 9 and (counts - 20_000 / 9).abs().max() < 5 * (20_000 / 9) ** 0.5
    assert abs(flip.float().mean().item() - 0.5) < 5 * 0.5 / 20_000**0.5


def test_training_images_are_augmented(small_cifars: Path) -> None:
    data = load_small(small_cifars, "cifar10")
    order, top, left, flip = data.draw(5)
    for step, (images, labels) in enumerate(data.train(5)):
        at = slice(8 * step, 8 * step + 8)
        cut = crop_and_flip(data.images, order[at], top[at], left[at], flip[at], 4)
        assert torch.equal(images, normalise(cut, data.mean, data.std)) and torch.equal(labels, data.labels[order[at]])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_batches_need_no_sync_and_can_be_captured(small_cifars: Path) -> None:
    data = load_small(small_cifars, "cifar10", device="cuda")
    batches = data.train(0)
    next(batches)  # the random choices of an epoch are moved with its first batch
    torch.cuda.set_sync_debug_mode("error")
    try:
        list(batches)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    at = [drawn[:8].clone() for drawn in data.draw(0)]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        images = normalise(crop_and_flip(data.images, *at, pad=4), data.mean, data.std)
    for step, (expected, _) in enumerate(data.train(1)):
        for buffer, drawn in zip(at, data.draw(1)):
            buffer.copy_(drawn[8 * step : 8 * step + 8])
        graph.replay()
        assert torch.equal(images, expected)
