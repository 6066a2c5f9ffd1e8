"""The cut: `keep_top` over N scores in 54 tensors, against torch's own ways to the same masks. All in one process.

    python benchmarks/ranking.py [--device cuda] [--scores 25500000]

Prints the median of the repeats with its spread, the factor over `torch.sort`, and the extra memory at the peak beside the
masks returned. Every way is checked to give the same masks.
"""

import argparse
import ctypes
import re
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from optg.ranking import keep_top

LAYERS = 54


def by_sort(scores: list[Tensor], zeros: int) -> list[Tensor]:
    flat = torch.cat([s.flatten() for s in scores])
    keep = torch.ones_like(flat, dtype=torch.bool)
    keep[flat.sort(stable=True).indices[:zeros]] = False
    return list(keep.split([s.numel() for s in scores]))


def by_topk(scores: list[Tensor], zeros: int) -> list[Tensor]:
    """Not exact where scores tie."""
    flat = torch.cat([s.flatten() for s in scores])
    keep = torch.zeros_like(flat, dtype=torch.bool)
    keep[flat.topk(len(flat) - zeros, sorted=False).indices] = True
    return list(keep.split([s.numel() for s in scores]))


def by_kthvalue(scores: list[Tensor], zeros: int) -> list[Tensor]:
    """Not exact where scores tie."""
    value = torch.cat([s.flatten() for s in scores]).kthvalue(zeros).values
    return [s > value for s in scores]


def resident(field: str) -> int:
    """Bytes of this process in memory: VmRSS now, or VmHWM at most since the mark was reset."""
    return int(re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024  # type: ignore[index]


def peak(device: str, call: Callable[[], list[Tensor]]) -> int:
    """Extra bytes at the peak of a call, beside what it returns."""
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        masks = call()
        top = torch.cuda.max_memory_allocated()
    else:
        ctypes.CDLL(None).malloc_trim(0)  # hand freed memory back, so that using it again is seen
        Path("/proc/self/clear_refs").write_text("5")
        before = resident("VmRSS")
        masks = call()
        top = resident("VmHWM")
    return top - before - sum(m.numel() for m in masks)


def timed(device: str, call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    if device == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - start) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--scores", type=int, default=25_500_000)
    parser.add_argument("--sparsity", type=float, default=0.95)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    generator = torch.Generator(args.device).manual_seed(0)
    sizes = [n.numel() for n in torch.empty(args.scores).tensor_split(LAYERS)]
    scores = [torch.randn(n, generator=generator, device=args.device) ** 3 for n in sizes]
    zeros = round(args.sparsity * args.scores)
    where = torch.cuda.get_device_name() if args.device == "cuda" else f"{torch.get_num_threads()} CPU threads"
    print(f"{args.scores:,} scores in {LAYERS} tensors, sparsity {args.sparsity}, {where}, torch {torch.__version__}")

    ways = {"keep_top": keep_top, "torch.sort": by_sort, "topk": by_topk, "kthvalue": by_kthvalue}
    keep_top(scores[:1], 1)  # what is loaded at first use is not what it costs
    extra = {name: peak(args.device, lambda way=way: way(scores, zeros)) for name, way in ways.items()}
    times: dict[str, list[float]] = {name: [] for name in ways}
    expected = by_sort(scores, zeros)
    for name, way in ways.items():
        assert all(torch.equal(a, b) for a, b in zip(way(scores, zeros), expected)), name
    for _ in range(args.repeats):
        for name, way in ways.items():
            times[name].append(timed(args.device, lambda way=way: way(scores, zeros)))
    base = statistics.median(times["torch.sort"])
    for name, taken in times.items():
        median = statistics.median(taken)
        spread = f"{min(taken):.2f} … {max(taken):.2f}"
        share = extra[name] / (4 * args.scores)
        print(f"{name:12} {median:10.2f} ms ({spread}), {base / median:6.1f}× sort, extra memory {share:7.1%} of the scores")


if __name__ == "__main__":
    main()
