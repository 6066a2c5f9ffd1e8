"""Train a small network on handwritten digits: dense, and with OptG at 90, 95 and 98 % sparsity.

    python examples/digits.py

`train` has an ordinary training loop. Only the call of `optg.sparsify` makes the network sparse.
"""

import argparse
import math
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import optg
from optg.core.accounting import Account, count
from optg.data import digits

RUNS = (("dense", 0.0), ("optg", 0.90), ("optg", 0.95), ("optg", 0.98))


@dataclass
class Result:
    """The outcome of one training run."""

    name: str
    target: float  # requested sparsity
    accuracy: float  # on the test images, after the last epoch
    sparsities: list[float]  # before training, and after each epoch
    account: Account  # weights and FLOPs of each layer
    seconds: float

    @property
    def nonzero(self) -> int:
        return sum(layer.nonzero for layer in self.account.layers)


def network() -> nn.Sequential:
    """Three convolutions and a classifier: 97,568 weights."""

    def convolution(inputs: int, outputs: int) -> list[nn.Module]:
        return [nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()]

    return nn.Sequential(
        *convolution(1, 32),
        nn.MaxPool2d(2),
        *convolution(32, 64),
        *convolution(64, 128),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(128 * 2 * 2, 10),
    )


def train(method: str, sparsity: float, epochs: int, seed: int, progress: Progress) -> Result:
    """Train one network. Without the call of `optg.sparsify`, it would be dense."""
    name = f"{method} {sparsity:.0%}" if sparsity else method
    train_data, test_data = digits.load()
    torch.manual_seed(seed)
    loader = DataLoader(TensorDataset(*train_data), batch_size=64, shuffle=True)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=2e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs)

    sparsifier = optg.sparsify(model, optimizer, method=method, sparsity=sparsity, epochs=epochs, steps_per_epoch=len(loader))

    start, sparsities = time.perf_counter(), [0.0]
    for _ in progress.track(range(epochs), description=name):
        model.train()
        for images, labels in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(images), labels).backward()
            optimizer.step()
        scheduler.step()
        sparsities.append(sparsifier.sparsity)
    seconds = time.perf_counter() - start

    accuracy = evaluate(model, *test_data)
    return Result(name, sparsity, accuracy, sparsities, count(model, test_data[0][:1]), seconds)


@torch.no_grad()
def evaluate(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> float:
    """Return the share of correctly classified images."""
    model.eval()
    return (model(images).argmax(1) == labels).float().mean().item()


def make_table(results: list[Result], title: str) -> Table:
    caption = "FLOPs: multiply-adds for one image. One test image is 0.28% of accuracy."
    table = Table(title=title, caption=caption, title_justify="left", caption_justify="left")
    table.add_column("training")
    for column in ("test accuracy", "sparsity", "weights left", "FLOPs", "seconds"):
        table.add_column(column, justify="right")
    for r in results:
        accuracy, sparsity, seconds = f"{r.accuracy:.2%}", f"{r.sparsities[-1]:.2%}", f"{r.seconds:.1f}"
        table.add_row(r.name, accuracy, sparsity, f"{r.nonzero:,}", f"{r.account.flops:,}", seconds)
    return table


def plot(results: list[Result], path: Path) -> None:
    """Plot accuracy against sparsity, sparsity over the epochs, and the density of each layer."""
    import matplotlib

    matplotlib.use("Agg")  # needs no screen
    from matplotlib import pyplot as plt

    plt.rcParams.update({"axes.spines.top": False, "axes.spines.right": False, "axes.axisbelow": True, "axes.titlepad": 12})
    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(13, 4.2), layout="constrained")
    dense, *sparse = results
    colours = dict(zip((r.name for r in results), ("#8c8c8c", "#9ecae1", "#4292c6", "#084594")))
    for panel in (left, middle, right):
        panel.grid(axis="y", color="#e8e8e8")

    shares = [r.nonzero / dense.nonzero for r in results]
    for share, r in zip(shares, results):
        mean, error = 100 * r.accuracy, 100 * (r.accuracy * (1 - r.accuracy) / 360) ** 0.5
        left.errorbar(share, mean, error, fmt="o", markersize=9, capsize=4, color=colours[r.name])
        left.annotate(f"{mean:.1f}", (share, mean - error), (0, -14), textcoords="offset points", ha="center")
    left.axhline(100 * dense.accuracy, color=colours[dense.name], linestyle=":", zorder=0)
    left.set_xscale("log")
    left.set_xticks(shares, ["dense", *(f"{r.target:.0%}" for r in sparse)])
    left.minorticks_off()
    left.set(xlim=(1.6, 0.0125), ylim=(min(95.0, 100 * min(r.accuracy for r in results) - 2), 100.6))
    left.set(
        title="Test accuracy after the last epoch",
        ylabel="%, ± one standard error",
        xlabel="sparsity, log scale of weights left",
    )

    for r in sparse:
        middle.plot([100 * s for s in r.sparsities], color=colours[r.name], linewidth=2, label=r.name)
    middle.set(title="Sparsity during training", xlabel="epochs trained", ylabel="%", ylim=(0, 103))
    middle.legend(frameon=False, loc="upper left")

    width = 0.8 / len(sparse)
    for i, r in enumerate(sparse):
        kept = [100 * layer.nonzero / math.prod(layer.shape) for layer in r.account.layers]
        bars = right.bar([x + width * i for x in range(len(kept))], kept, width, color=colours[r.name], label=r.name)
        right.bar_label(bars, [f"{share:.0f}" for share in kept], fontsize=8, padding=1)
    kinds = {2: "linear", 4: "3×3"}
    labels = [f"{kinds[len(layer.shape)]}\n{layer.shape[1]}→{layer.shape[0]}" for layer in dense.account.layers]
    right.set_xticks([x + width for x in range(len(labels))], labels)
    right.set(title="Density of each layer", xlabel="layer, inputs → outputs", ylabel="%")
    right.legend(frameon=False)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--epochs", type=int, default=25, help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="of the initial weights and the batches; default: %(default)s")
    parser.add_argument("--output", type=Path, default="demo", metavar="FOLDER", help="for the plot; default: %(default)s")
    options = parser.parse_args()
    if options.epochs < 1:
        parser.error(f"--epochs is {options.epochs}; expected at least 1")
    return options


def main() -> None:
    options = arguments()
    options.output.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)  # this network is too small for more, and on busy cores they would slow it down
    console = Console()
    results = []
    columns = (
        TextColumn("{task.description:>8}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("epochs"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        for method, sparsity in RUNS:
            results.append(train(method, sparsity, options.epochs, options.seed, progress))
            if not console.is_terminal:  # in a log, print a line per run instead of progress bars
                console.print(f"{results[-1].name}: trained for {options.epochs} epochs, {results[-1].seconds:.1f} s")
    console.print(make_table(results, f"Handwritten digits, {options.epochs} epochs, seed {options.seed}"))
    plot(results, options.output / "digits.png")
    console.print(f"Plot: {options.output / 'digits.png'}", soft_wrap=True)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        print("Interrupted.", file=sys.stderr)
        sys.exit(130)
