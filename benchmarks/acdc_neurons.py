"""Why AC/DC as published fails at high sparsity and few epochs: a small CNN on ten classes of CIFAR-100, on a CPU.

    python benchmarks/acdc_neurons.py --folder data --epochs 12

Compares AC/DC as published, the same with a larger ε in batch norm, AC/DC that leaves one weight in every output neuron, and
GMP, each with a cosine and with a held learning rate. Images are halved to 16×16. Prints the test accuracy after the last
epoch.
"""

import argparse

import torch
from small_cifar import accuracy, halve, train, vgg
from torch import Tensor, nn

from optg import data
from optg.methods import ACDC, GMP


def load(folder: str) -> list[tuple[Tensor, Tensor]]:
    """Return the images and labels of ten classes, for training and for testing."""
    source = data.load("cifar100", folder, batch_size=1, device="cpu", seed=0)
    parts = (source.images, source.labels), source.tested
    return [(halve(images[labels < 10]), labels[labels < 10]) for images, labels in parts]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", default="data")
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--sparsity", type=float, default=0.95)
    options = parser.parse_args()
    torch.set_num_threads(1)
    known, test = load(options.folder)
    rows = [
        ("AC/DC, published", ACDC(spare_neurons=False), 1e-5),
        ("AC/DC, published, ε 0.01", ACDC(spare_neurons=False), 0.01),  # a dead neuron's gradient: 10 times, not 300 times
        ("AC/DC", ACDC(), 1e-5),
        ("GMP", GMP(every=10), 1e-5),
    ]
    for name, method, epsilon in rows:
        for hold in (0.0, 0.5):
            torch.manual_seed(0)
            model = vgg(16, 16, 0, 32, 32, 0, 64, 64)
            for norm in filter(lambda module: isinstance(module, nn.BatchNorm2d), model):
                norm.eps = epsilon
            train(model, *known, method, options.sparsity, options.epochs, hold)
            print(f"{name}, {'held rate' if hold else 'cosine'}: {accuracy(model, *test):.1%}", flush=True)


if __name__ == "__main__":
    main()
