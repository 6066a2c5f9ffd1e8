"""Measure whether a shrunk model is as fast as its FLOPs promise: throughput of ResNet-50 without 70 % of its channels.

    python benchmarks/shrunk.py [--model resnet50] [--sparsity 0.7] [--batch 256] [--size 224]

The channels are chosen by magnitude, without training. Both models run in inference mode, on a GPU compiled in bfloat16 and
channels_last, on a CPU as they are, and take turns. `share` is the measured speed-up divided by the ratio of FLOPs.
"""

import argparse
import copy
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

import optg
from optg import models
from optg.core.accounting import count
from optg.methods import GMP


def without_channels(model: nn.Module, sparsity: float, example: Tensor) -> nn.Module:
    """Return the model with the smallest channels set to 0."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    method = GMP(schedule="constant")
    optg.sparsify(model, optimizer, method, sparsity=sparsity, steps=1, structure="channel", example=example).finish()
    return model.eval()


def prepare(model: nn.Module, images: Tensor) -> Callable[[], Tensor]:
    if not images.is_cuda:
        return lambda: model(images)
    fast = torch.compile(copy.deepcopy(model).to(images.device, images.dtype, memory_format=torch.channels_last))
    return lambda: fast(images)


@torch.inference_mode()
def seconds(call: Callable[[], Tensor], calls: int, device: torch.device) -> float:
    """Return the time of some calls."""
    if device.type == "cpu":
        started = time.process_time()
        for _ in range(calls):
            call()
        return time.process_time() - started
    torch.cuda.synchronize()
    started = time.perf_counter()
    for _ in range(calls):
        call()
    torch.cuda.synchronize()
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="resnet50")
    parser.add_argument("--sparsity", type=float, default=0.7)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--calls", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=9)
    given = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu":
        torch.set_num_threads(1)
    torch.manual_seed(0)
    example = torch.randn(1, 3, given.size, given.size)
    dense = without_channels(models.build(given.model, 1000), given.sparsity, example)
    small = optg.shrink(dense, example)
    promised = count(dense, example).dense_flops / count(small, example).dense_flops
    images = torch.randn(given.batch, 3, given.size, given.size).to(device, memory_format=torch.channels_last)
    images = images.bfloat16() if device.type == "cuda" else images
    calls = [prepare(model, images) for model in (dense, small)]
    times: list[list[float]] = [[], []]
    for turn in range(given.rounds + 1):  # the first turn compiles
        for call, found in zip(calls, times):
            measured = seconds(call, given.calls if turn else 3, device)
            found += [measured / given.calls] if turn else []
    before, after = map(statistics.median, times)
    for name, median in (("dense", before), ("shrunk", after)):
        print(f"{name}: {1e3 * median:.2f} ms, {given.batch / median:,.0f} images/s")
    share = before / after / promised
    print(f"FLOPs: 1/{promised:.2f}; speed-up {before / after:.2f}, share {share:.0%} of what the FLOPs promise")


if __name__ == "__main__":
    main()
