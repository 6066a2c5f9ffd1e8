"""Measure what structures cost: a cut of all scores, and a training step of a small batch.

    python benchmarks/structures.py [--device cuda] [--model resnet50] [--structures 2:4 1x4 channel]

The cut is that of magnitudes at half of the target, which both ranks and protects. Times are medians of runs in turns, on a CPU
in processor time of one thread.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import nn

import optg
from optg import models


def measure(calls: dict[str, Callable[[], None]], rounds: int, cuda: bool) -> dict[str, float]:
    """Return the median time of each call in milliseconds; the calls take turns."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            if cuda:
                torch.cuda.synchronize()
            start = time.perf_counter() if cuda else time.process_time()
            call()
            if cuda:
                torch.cuda.synchronize()
            times[name].append((time.perf_counter() if cuda else time.process_time()) - start)
    return {name: 1e3 * statistics.median(values) for name, values in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--model", default="resnet50")
    parser.add_argument("--method", default="gmp")
    parser.add_argument("--structures", nargs="+", default=["2:4", "1x4", "4x1", "channel"])
    parser.add_argument("--rounds", type=int, default=9)
    given = parser.parse_args()
    device, cuda = torch.device(given.device), given.device.startswith("cuda")
    if not cuda:
        torch.set_num_threads(1)
    cuts, steps = dict[str, Callable[[], None]](), dict[str, Callable[[], None]]()
    for structure in ("unstructured", *given.structures):
        torch.manual_seed(0)
        model = models.build(given.model, 1000).to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)
        sparsity = None if ":" in structure else 0.5
        sparsifier = optg.sparsify(
            model, optimizer, given.method, sparsity=sparsity, steps=10**6, structure=structure,
            example=torch.zeros(1, 3, 224, 224, device=device),
        )  # fmt: skip
        weights = sparsifier.weights
        scores = [value.abs() for value in weights.values]

        def cut(weights=weights, scores=scores) -> None:
            weights.cut(scores, weights.target / 2)

        def step(model: nn.Module = model, optimizer: torch.optim.Optimizer = optimizer) -> None:
            optimizer.step()  # without forward and backward, which no structure changes

        for p in model.parameters():
            p.grad = torch.randn_like(p)
        cuts[structure], steps[structure] = cut, step
        cut(), step()
    size = sum(p.numel() for p in model.parameters())
    print(f"{given.model}, {size / 1e6:.1f}M parameters, {given.method}, {device}")
    print(f"{'structure':>14} {'cut ms':>9} {'ratio':>6} {'optimizer step ms':>18} {'ratio':>6}")
    found, stepped = measure(cuts, given.rounds, cuda), measure(steps, given.rounds, cuda)
    for name in cuts:
        ratios = found[name] / found["unstructured"], stepped[name] / stepped["unstructured"]
        print(f"{name:>14} {found[name]:>9.1f} {ratios[0]:>6.2f} {stepped[name]:>18.1f} {ratios[1]:>6.2f}")


if __name__ == "__main__":
    main()
