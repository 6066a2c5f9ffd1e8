"""Measure large models on one core: OptG's step at 10⁸ parameters, and `optg.save` at 2,000 layers.

    python benchmarks/large.py [--parameters 100000000] [--width 1000] [--layers 2000] [--rounds 15]

Plain SGD with momentum and OptG step in turns, on the same parameters and gradients, so that both see the same load of the
machine; so do `optg.save` and torch.export, which captures the graph for it. Only `optimizer.step()` is measured, not forward
and backward. The output has the median and the quartiles of wall time and of CPU time, which other processes disturb less,
and the peak memory.
"""

import argparse
import resource
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.export import Dim

import optg

EPOCHS, STEPS_PER_EPOCH, SPARSITY = 100, 5, 0.9


class Seconds(NamedTuple):
    wall: float
    cpu: float


def measured(work: Callable[[], Any]) -> Seconds:
    wall, cpu = time.perf_counter(), time.process_time()
    work()
    return Seconds(time.perf_counter() - wall, time.process_time() - cpu)


def show(name: str, times: list[Seconds]) -> Seconds:
    """Print the median and the quartiles of wall and CPU time. Return the medians."""
    columns = [statistics.quantiles(column, n=4) if len(column) > 1 else [column[0]] * 3 for column in zip(*times)]
    texts = [f"{name} {q[1]:7.3f} s ({q[0]:.3f} – {q[2]:.3f})" for name, q in zip(("wall", "CPU"), columns)]
    print(f"{name:38} {'   '.join(texts)}", flush=True)
    return Seconds(columns[0][1], columns[1][1])


def measure_steps(parameters: int, width: int, rounds: int) -> None:
    """Compare steps of SGD and of OptG, with and without a cut."""
    model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(parameters // width**2)))
    plain = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    sparsifier = optg.sparsify(model, optimizer, sparsity=SPARSITY, epochs=EPOCHS, steps_per_epoch=STEPS_PER_EPOCH)
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    clock, method = sparsifier.clock, sparsifier.method
    clock.step = EPOCHS * STEPS_PER_EPOCH // 2 + 1  # the sparsity rises fastest in the middle of training
    plain.step()
    optimizer.step()
    both: dict[str, list[Seconds]] = {"SGD with momentum": [], "OptG": [], "OptG with a cut": []}
    while min(len(both["OptG"]), len(both["OptG with a cut"]) * STEPS_PER_EPOCH) < rounds:
        both["SGD with momentum"].append(measured(plain.step))
        cuts = method.due(clock.at(clock.step + 1))
        both["OptG with a cut" if cuts else "OptG"].append(measured(optimizer.step))
    size = sum(p.numel() for p in model.parameters())
    print(f"{size:,} parameters in {len(model)} layers, sparsity {sparsifier.sparsity:.2%}")
    base, own, _ = (show(name, times) for name, times in both.items())
    print(f"ratio: wall {own.wall / base.wall:.2f}, CPU {own.cpu / base.cpu:.2f}")
    slowest = [max(column) for column in zip(*both["OptG"], *both["OptG with a cut"])]
    print(f"slowest step: wall {slowest[0]:.3f} s, CPU {slowest[1]:.3f} s")


def measure_save(layers: int, rounds: int) -> None:
    """Compare `optg.save` of a deep model with torch.export alone, which captures the graph."""
    torch.manual_seed(0)
    model = nn.Sequential(*(layer for _ in range(layers) for layer in (nn.Linear(32, 32), nn.ReLU()))).eval()
    for p in model.parameters():
        p.data[torch.rand_like(p) < SPARSITY] = 0.0
    both: dict[str, list[Seconds]] = {f"optg.save of {layers:,} layers": [], "torch.export alone": []}
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        optg.save(nn.Linear(4, 4), Path(folder) / "first.optg", torch.zeros(1, 4))  # torch imports its exporter now
        for _ in range(rounds):
            times = (
                measured(lambda: optg.save(model, Path(folder) / "deep.optg", torch.zeros(1, 32))),
                measured(lambda: torch.export.export(model, (torch.zeros(2, 32),), dynamic_shapes=({0: Dim.AUTO},))),
            )
            for known, time_taken in zip(both.values(), times):
                known.append(time_taken)
    for name, known in both.items():
        show(name, known)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=int, default=10**8, help="0: leave out the steps")
    parser.add_argument("--width", type=int, default=1000, help="of a layer: 1000 makes layers that fit in cache")
    parser.add_argument("--layers", type=int, default=2000, help="0: leave out optg.save")
    parser.add_argument("--rounds", type=int, default=15, help="steps of each kind")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.parameters:
        measure_steps(args.parameters, args.width, args.rounds)
    if args.layers:
        measure_save(args.layers, max(1, args.rounds // 5))
    print(f"peak memory: {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20:.2f} GiB")


if __name__ == "__main__":
    main()
