"""Why AC/DC as published fails at high sparsity and few epochs: a small CNN on ten classes of CIFAR-100, on a CPU.

    python benchmarks/acdc_neurons.py --folder data --epochs 12

Compares AC/DC as published, AC/DC that leaves one weight in every output neuron, both with a held learning rate, and GMP.
Images are halved to 16×16. Prints the test accuracy after the last epoch.
"""

import argparse
import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import optg
from optg import data
from optg.methods import ACDC, GMP, Method

BATCH, LR, DECAY = 128, 0.1, 1e-3


def network() -> nn.Sequential:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for inputs, width in ((3, 16), (16, 16), (0, 0), (16, 32), (32, 32), (0, 0), (32, 64), (64, 64)):
        block = [nn.Conv2d(inputs, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
        layers += block if width else [nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))


def load(folder: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the images and labels of ten classes, for training and for testing."""
    source = data.load("cifar100", folder, batch_size=1, device="cpu", seed=0)
    parts = []
    for images, labels in ((source.images, source.labels), source.tested):
        chosen = labels < 10
        parts += [F.avg_pool2d((images[chosen].float() - 120) / 60, 2), labels[chosen]]
    return tuple(parts)


def augment(images: Tensor, generator: torch.Generator) -> Tensor:
    """Mirror each image by chance, and shift the batch by up to two pixels."""
    flip = torch.rand(len(images), generator=generator) < 0.5
    images = torch.where(flip[:, None, None, None], images.flip(3), images)
    shift = torch.randint(-2, 3, (2,), generator=generator).tolist()
    return F.pad(images, (2, 2, 2, 2)).roll(shift, (2, 3))[:, :, 2:-2, 2:-2]


def accuracy(parts: tuple[Tensor, ...], method: Method, sparsity: float, epochs: int, hold: float) -> float:
    images, labels, test_images, test_labels = parts
    model, generator = network(), torch.Generator().manual_seed(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9, weight_decay=DECAY)
    steps = len(images) // BATCH
    sparsifier = optg.sparsify(model, optimizer, method, sparsity=sparsity, epochs=epochs, steps_per_epoch=steps)
    for _ in range(epochs):
        for index in torch.randperm(len(images), generator=generator).split(BATCH)[:steps]:
            progress = max(sparsifier.clock.progress - hold, 0) / (1 - hold)
            optimizer.param_groups[0]["lr"] = LR * (1 + math.cos(math.pi * progress)) / 2
            optimizer.zero_grad()
            F.cross_entropy(model(augment(images[index], generator)), labels[index]).backward()
            optimizer.step()
    sparsifier.finish()
    model.eval()
    with torch.no_grad():
        return float((model(test_images).argmax(1) == test_labels).float().mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", default="data")
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--sparsity", type=float, default=0.95)
    options = parser.parse_args()
    torch.set_num_threads(1)
    parts = load(options.folder)
    methods = {"AC/DC, published": ACDC(spare_neurons=False), "AC/DC": ACDC(), "GMP": GMP(every=10)}
    for name, method in methods.items():
        for hold in (0.0, 0.5):
            found = accuracy(parts, method, options.sparsity, options.epochs, hold)
            print(f"{name}, {'held rate' if hold else 'cosine'}: {found:.1%}", flush=True)


if __name__ == "__main__":
    main()
