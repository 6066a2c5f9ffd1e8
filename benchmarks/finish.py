"""Measure `sparsifier.verify()`, the check that `finish()` makes, and a whole `finish()`.

    python benchmarks/finish.py [--model resnet50] [--methods gmp optg] [--device cuda]

`verify` is the median of several calls, `finish` one call after a few steps. Both end with the device idle.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch

import optg
from optg import models


def milliseconds(call: Callable[[], object]) -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    start = time.perf_counter()
    call()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="resnet50")
    parser.add_argument("--methods", nargs="+", default=["gmp", "optg", "feather"])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--calls", type=int, default=15)
    given = parser.parse_args()
    for method in given.methods:
        torch.manual_seed(0)
        model = models.build(given.model, 1000).to(given.device)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)
        sparsifier = optg.sparsify(model, optimizer, method, sparsity=0.9, steps=10)
        for _ in range(10):
            for p in model.parameters():
                p.grad = torch.randn_like(p)
            optimizer.step()
        check = statistics.median(milliseconds(sparsifier.verify) for _ in range(given.calls))
        weights = sum(value.numel() for value in sparsifier.weights.values)
        finish = milliseconds(sparsifier.finish)
        print(f"{given.model}, {weights / 1e6:.1f}M weights, {method}: verify {check:.2f} ms, finish {finish:.2f} ms")


if __name__ == "__main__":
    main()
