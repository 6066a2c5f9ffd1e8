"""phoenix and its parts on a small scale: five convolutions on 20,000 images of CIFAR-10, halved to 16×16, on a CPU.

    python benchmarks/phoenix_small.py --folder data --output phoenix-small.jsonl

Trains on the first 20,000 training images and validates on the last 5,000. Writes one line per run: the accuracy on the
validation images and on the test images. Runs that are in the file are not repeated. `--table` prints means and standard errors
of the runs so far, on validation images; with `--test`, on test images. `--watch LAYER` trains once more and prints the dead
neurons of a layer, its gradient and its weights every 400 steps and around `--around STEP`.
"""

import argparse
import json
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import mean, variance

import torch
from small_cifar import accuracy, halve, train, vgg
from torch import Tensor, nn

import optg
from optg import data
from optg.methods import Dense, Feather, Method, OptG, Phoenix

TRAINED = 20_000


@dataclass(frozen=True)
class Row:
    method: Method
    hold: float = 0.5  # share of training in which the learning rate is constant
    floor: float = 0.0  # share of its weights that every output neuron keeps: at least one, if this is not 0
    epsilon: float = 1e-5  # of batch norm


RAMP = {"start": 0.06, "end": 0.7}  # phoenix's
ROWS = {
    "OptG": Row(OptG(), hold=0.0),
    "Feather": Row(Feather(), hold=0.0),
    "Feather, ramp and rate": Row(Feather(**RAMP)),
    "Feather, ramp and rate, + HAM": Row(Phoenix(rest_dead=False)),
    "phoenix without HAM": Row(Phoenix(ham=0.0)),
    "phoenix": Row(Phoenix()),
    "phoenix, reopen 0.1": Row(Phoenix(reopen=0.1)),
    "phoenix, reopen 0.3": Row(Phoenix(reopen=0.3)),
    "dense": Row(Dense(), hold=0.0),
    "Feather, ramp and rate, ε 0.01": Row(Feather(**RAMP), epsilon=0.01),
    "Feather, ramp and rate, + HAM, ε 0.01": Row(Phoenix(rest_dead=False), epsilon=0.01),
    "Feather, ramp and rate, every neuron keeps a weight": Row(Feather(**RAMP), floor=1e-6),
    "Feather, ramp and rate, + HAM, every neuron keeps a weight": Row(Phoenix(rest_dead=False), floor=1e-6),
}


def load(folder: str) -> list[tuple[Tensor, Tensor]]:
    """Return images and labels for training, for validation and for the test."""
    source = data.load("cifar10", folder, batch_size=1, device="cpu", seed=0, validate=True)
    parts = (source.images[:TRAINED], source.labels[:TRAINED]), source.held, source.tested
    return [(halve(images).contiguous(memory_format=torch.channels_last), labels) for images, labels in parts]


def network(row: Row, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    model = vgg(16, 0, 32, 0, 64, 64, 0, 128).to(memory_format=torch.channels_last)
    for norm in filter(lambda module: isinstance(module, nn.BatchNorm2d), model):
        norm.eps = row.epsilon
    return model


def print_neurons(layer: int, around: int, sparsifier: optg.Sparsifier) -> None:
    """Print a layer's dead neurons, gradient norm, largest latent weight and kept weights."""
    step, weights = sparsifier.clock.step, sparsifier.weights
    if step % 400 == 0 or (abs(step - around) <= 16 and step % 16 == 0):
        mask, latent, grad = weights.masks[layer], weights.latent[layer], weights.parameters[layer].grad
        dead, kept = int((~mask.flatten(1).any(1)).sum()), sum(int(m.sum()) for m in weights.masks)
        print(
            f"step {step}: {dead} dead neurons, gradient {grad.norm():.3g}, largest weight {latent.abs().max():.3g}, "
            f"kept {int(mask.sum())} of {kept}",
            flush=True,
        )


def result(row: Row, sparsity: float, seed: int, epochs: int, parts: list[tuple[Tensor, Tensor]]) -> dict[str, float]:
    known, held, test = parts
    model = network(row, seed)
    started = time.process_time()
    train(model, *known, row.method, sparsity, epochs, row.hold, seed, floor=row.floor, floor_by="output")
    seconds = round(time.process_time() - started, 1)
    return {"validation": accuracy(model, *held), "test": accuracy(model, *test), "seconds": seconds}


def key(run: dict[str, object]) -> tuple[object, ...]:
    return run["row"], run["sparsity"], run["seed"], run["epochs"]


def print_table(runs: list[dict], part: str) -> None:
    """Print means and standard errors; the deviation is pooled over all cells."""
    cells: dict[tuple[str, float], list[float]] = {}
    for run in runs:
        cells.setdefault((run["row"], run["sparsity"]), []).append(100 * run[part])
    spread = [(len(values) - 1, variance(values)) for values in cells.values() if len(values) > 1]
    deviation = (sum(n * v for n, v in spread) / max(sum(n for n, _ in spread), 1)) ** 0.5
    for (row, sparsity), values in cells.items():
        error = f" ± {deviation / len(values) ** 0.5:.2f}" if spread else ""
        print(f"{row} | {sparsity:.0%} | {mean(values):.2f}{error} | seeds: {len(values)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", default="data")
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--sparsity", type=float, default=0.98)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS))
    parser.add_argument("--output", type=Path, default=Path("phoenix-small.jsonl"))
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--test", action="store_true")
    parser.add_argument("--watch", type=int, metavar="LAYER")
    parser.add_argument("--around", type=int, default=0)
    options = parser.parse_args()
    runs = [json.loads(line) for line in options.output.read_text().splitlines()] if options.output.exists() else []
    if options.table:
        return print_table([run for run in runs if run["epochs"] == options.epochs], "test" if options.test else "validation")
    torch.set_num_threads(1)
    parts = load(options.folder)
    if options.watch is not None:
        row, seed = ROWS[options.rows[0]], options.seeds[0]
        watch = partial(print_neurons, options.watch, options.around)
        return train(network(row, seed), *parts[0], row.method, options.sparsity, options.epochs, row.hold, seed, watch)
    for seed in options.seeds:
        for name in options.rows:
            row = ROWS[name]
            sparsity = 0.0 if isinstance(row.method, Dense) else options.sparsity
            run = {"row": name, "sparsity": sparsity, "seed": seed, "epochs": options.epochs}
            if key(run) not in map(key, runs):
                runs.append(run | result(row, sparsity, seed, options.epochs, parts))
                with options.output.open("a") as file:
                    print(json.dumps(runs[-1]), file=file)


if __name__ == "__main__":
    main()
