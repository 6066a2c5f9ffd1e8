"""Compare optg's ranking of channels with three others: seven convolutions, 16,000 CIFAR-10 images at 16×16 pixels, on a CPU.

    python benchmarks/channels_small.py --folder data [--methods optg gmp feather] [--sparsity 0.5 0.7] [--ways "as it is"]

Prints the accuracy on the last 5,000 training images, and the channels that each layer keeps.
"""

import argparse
from collections.abc import Sequence
from typing import Any

import torch
from small_cifar import accuracy, halve, train, vgg
from torch import Tensor, nn

from optg import data
from optg.core import channel_pool
from optg.core.channel_pool import ChannelPool, channel_sums
from optg.methods import METHODS

TRAINED, WIDTHS = 16_000, (32, 32, 0, 64, 64, 0, 128, 128, 128)


def mean_scores(pool: ChannelPool, scores: Sequence[Tensor]) -> list[Tensor]:
    """Return the mean score of each channel."""
    units = []
    for group in pool.groups:
        ranked = [(scores[i], s) for i, s in group if s.ranked]
        parts = [channel_sums(score.double(), s.dim)[s.index].sum(1) for score, s in ranked]
        units.append(torch.stack(parts).sum(0) / sum(score.numel() for score, _ in ranked) * len(parts[0]))
    return units


AS_IT_IS = ChannelPool.unit_scores
WAYS: dict[str, tuple[Any, float]] = {  # how channels are scored, and the least share
    "as it is": (AS_IT_IS, channel_pool.LEAST_SHARE),
    "no least share": (AS_IT_IS, 0.0),
    "positive scores, not compared within groups": (
        lambda pool, scores: mean_scores(pool, [score.clamp(min=0) for score in scores]), channel_pool.LEAST_SHARE,
    ),
    "mean score": (mean_scores, 0.0),
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", default="data", help="that of CIFAR-10")
    parser.add_argument("--methods", nargs="+", default=["optg", "gmp", "feather"], choices=METHODS)
    parser.add_argument("--sparsity", nargs="+", type=float, default=[0.5, 0.7])
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=WAYS)
    parser.add_argument("--epochs", type=int, default=6)
    given = parser.parse_args()
    torch.set_num_threads(1)
    source: Any = data.load("cifar10", given.folder, batch_size=1, device="cpu", seed=0, validate=True)
    images, labels, held = halve(source.images[:TRAINED]), source.labels[:TRAINED], (halve(source.held[0]), source.held[1])
    for method in given.methods:
        for sparsity in given.sparsity:
            for way in given.ways:
                scoring, channel_pool.LEAST_SHARE = WAYS[way]
                ChannelPool.unit_scores = scoring
                torch.manual_seed(0)
                model, example = vgg(*WIDTHS), torch.zeros(1, 3, 16, 16)
                chosen = METHODS[method]()
                train(model, images, labels, chosen, sparsity, given.epochs, structure="channel", example=example)
                kept = [int(m.weight.flatten(1).any(1).sum()) for m in model if isinstance(m, nn.Conv2d)]
                print(f"{method:8} {sparsity:.0%}  {100 * accuracy(model, *held):.1f}  {kept}  {way}", flush=True)


if __name__ == "__main__":
    main()
