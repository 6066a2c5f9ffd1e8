"""Compare our cut of N scores in 54 tensors, with new masks and in place, with torch functions that compute the same masks.

    python benchmarks/ranking.py [--device cuda] [--scores 100000 25500000 …]

The output has the median time with minimum and maximum, the speed relative to `torch.sort`, and the extra peak memory beyond
the masks. Our masks must equal those of a stable sort; "other masks" marks functions whose masks differ.
"""

import argparse
import ctypes
import re
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from optg.core.masks import keep_top
from optg.core.passes import choose

LAYERS = 54


class InPlace:
    """The cut of a training step: it overwrites existing masks, and does not synchronise with a GPU."""

    def __init__(self) -> None:
        self.masks: list[Tensor] = []

    def __call__(self, scores: list[Tensor], zeros: int) -> list[Tensor]:
        if [m.shape for m in self.masks] != [s.shape for s in scores]:
            self.masks = [torch.ones_like(s, dtype=torch.bool) for s in scores]
        passes = choose(scores)
        passes.write_masks(self.masks, scores, passes.select(scores, zeros))
        return self.masks


def by_sort(scores: list[Tensor], zeros: int) -> list[Tensor]:
    flat = torch.cat([s.flatten() for s in scores])
    keep = torch.ones_like(flat, dtype=torch.bool)
    keep[flat.sort(stable=True).indices[:zeros]] = False
    return list(keep.split([s.numel() for s in scores]))


def by_topk(scores: list[Tensor], zeros: int) -> list[Tensor]:
    """Not exact if scores tie."""
    flat = torch.cat([s.flatten() for s in scores])
    keep = torch.zeros_like(flat, dtype=torch.bool)
    keep[flat.topk(len(flat) - zeros, sorted=False).indices] = True
    return list(keep.split([s.numel() for s in scores]))


def by_kthvalue(scores: list[Tensor], zeros: int) -> list[Tensor]:
    """Not exact if scores tie."""
    value = torch.cat([s.flatten() for s in scores]).kthvalue(zeros).values
    return [s > value for s in scores]


def resident(field: str) -> int:
    """Return the resident memory of this process in bytes: VmRSS is current, VmHWM the peak since the last reset."""
    return int(re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024  # type: ignore[index]


def peak(device: str, call: Callable[[], list[Tensor]]) -> int:
    """Return the peak memory of a call in bytes, beyond what is in use after it."""
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        masks = call()
        top, left = torch.cuda.max_memory_allocated(), torch.cuda.memory_allocated()
    else:
        release = ctypes.CDLL(None).malloc_trim  # returns freed memory, so that using it again counts
        release(0)
        Path("/proc/self/clear_refs").write_text("5")
        masks = call()
        top = resident("VmHWM")
        release(0)
        left = resident("VmRSS")
    del masks
    return top - left


def timed(device: str, call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    if device == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - start) * 1e3


WAYS: dict[str, Callable[[list[Tensor], int], list[Tensor]]] = {
    "keep_top": keep_top, "in place": InPlace(), "torch.sort": by_sort, "topk": by_topk, "kthvalue": by_kthvalue,
}  # fmt: skip


def compare(count: int, sparsity: float, device: str, ways: list[str], repeats: int) -> None:
    generator = torch.Generator(device).manual_seed(0)
    scores = [
        torch.randn(count // LAYERS + (i < count % LAYERS), generator=generator, device=device) ** 3 for i in range(LAYERS)
    ]
    zeros = round(sparsity * count)
    where = torch.cuda.get_device_name() if device == "cuda" else f"{torch.get_num_threads()} CPU threads"
    print(f"{count:,} scores in {LAYERS} tensors, sparsity {sparsity}, {where}, torch {torch.__version__}", flush=True)

    calls: dict[str, Callable[[], list[Tensor]]] = {name: partial(WAYS[name], scores, zeros) for name in ways}
    for call in calls.values():
        call()  # exclude the cost of the first call
    extra = {name: peak(device, call) for name, call in calls.items()}
    expected = by_sort(scores, zeros)
    same = {name: all(map(torch.equal, call(), expected)) for name, call in calls.items()}
    del expected
    assert same.get("keep_top", True) and same.get("in place", True)
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(repeats):
        for name, call in calls.items():
            times[name].append(timed(device, call))
    for name, taken in times.items():
        median = statistics.median(taken)
        spread = f"{min(taken):.2f} … {max(taken):.2f}"
        factor = f"{statistics.median(times['torch.sort']) / median:6.1f}× sort, " if "torch.sort" in times else ""
        share = f"extra memory {extra[name] / (4 * count):7.1%} of the scores"
        print(f"{name:12} {median:10.2f} ms ({spread}), {factor}{share}{'' if same[name] else ', other masks'}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--scores", type=int, nargs="+", default=[25_500_000])
    parser.add_argument("--sparsity", type=float, default=0.95)
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=WAYS)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    for count in args.scores:
        compare(count, args.sparsity, args.device, args.ways, args.repeats)


if __name__ == "__main__":
    main()
