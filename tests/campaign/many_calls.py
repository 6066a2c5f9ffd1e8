"""Part: a compiled model is called again and again; the resident memory must not grow.

python -m tests.campaign.many_calls --count 1000000 --seconds 7200
"""

import json
import os
import random
import time
from collections import Counter
from pathlib import Path

import torch
from torch import nn

import optg
from tests.campaign.seeds import parse_args

BATCHES = (1, 3, 16, 33)
GROWTH = 2 * 2**20  # bytes that are no growth: the allocator may keep a page or two


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def small_model() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.GELU(),
        nn.Linear(128, 10),
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter *= torch.rand_like(parameter) < 0.3
    return model.eval()


def call_many_times(count: int, seed: int, seconds: float) -> dict[str, object]:
    """Call a model with one and two threads and several batch sizes. Return the counts, and the memory that grew."""
    model, rng = small_model(), random.Random(seed)
    inputs = [torch.randn(batch, 1, 8, 8) for batch in BATCHES]
    compiled = [optg.compile(model, inputs[0], threads=threads) for threads in (1, 2)]
    with torch.no_grad():
        expected = [model(x) for x in inputs]
    began, counts, failures = time.monotonic(), Counter(cases=0), []
    before = None
    while counts["cases"] < count and time.monotonic() - began < seconds:
        at = rng.randrange(len(inputs))
        got = compiled[counts["cases"] % 2](inputs[at])
        counts["cases"] += 1
        if counts["cases"] % 1000 == 0 and not torch.allclose(got, expected[at], atol=1e-4):
            failures.append(f"call {counts['cases']}: another result")
        if before is None and counts["cases"] >= min(2000, count // 4):
            before = resident()  # every batch size has been planned
    growth = resident() - (before or resident())
    if growth > GROWTH:
        failures.append(f"the memory grew by {growth:,} bytes")
    return {
        "seed": seed,
        "next": seed + counts["cases"],
        "seconds": round(time.monotonic() - began, 1),
        "counts": dict(counts),
        "growth_bytes": growth,
        "failures": failures,
    }


def main() -> None:
    args = parse_args(__doc__)
    torch.set_num_threads(1)
    print(json.dumps(call_many_times(args.count, args.seed, args.seconds)), flush=True)


if __name__ == "__main__":
    main()
