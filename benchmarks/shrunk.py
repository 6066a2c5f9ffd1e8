"""Measure whether a shrunk model is as fast as its FLOPs promise: throughput of ResNet-50 without 70 % of its channels.

    python benchmarks/shrunk.py [--model resnet50] [--sparsity 0.7] [--batch 256] [--size 224] [--multiples 1 8 16 32]

The channels are chosen by magnitude, without training. The dense model and one shrunk model for each multiple take turns in
inference mode. On a GPU they run in bfloat16 and channels_last, compiled, in CUDA graphs; on a CPU they run as they are.
`share` is the measured speed-up divided by the ratio of FLOPs. `traffic` is computed, not measured: the bytes of the inputs and
outputs of all convolutions and linear layers, each read or written once. Where memory is the limit, the ratio of traffic bounds
the speed-up.
"""

import argparse
import copy
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

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


def activations(model: nn.Module, example: Tensor) -> int:
    """Return how many numbers the convolutions and linear layers read as inputs and write as outputs."""
    sizes: list[int] = []
    layers = [module for module in model.modules() if isinstance(module, (_ConvNd, nn.Linear))]
    hooks = [layer.register_forward_hook(lambda _, args, out: sizes.append(args[0].numel() + out.numel())) for layer in layers]
    with torch.inference_mode():
        model(example)
    for hook in hooks:
        hook.remove()
    return sum(sizes)


def prepare(model: nn.Module, images: Tensor) -> Callable[[], Tensor]:
    if not images.is_cuda:
        return lambda: model(images)
    fast = copy.deepcopy(model).to(images.device, images.dtype, memory_format=torch.channels_last)
    fast = torch.compile(fast, mode="reduce-overhead", dynamic=False)
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


def show_kernels(name: str, call: Callable[[], Tensor]) -> None:
    """Print the GPU kernels that take the most time in one call."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile, torch.inference_mode():
        call()
        torch.cuda.synchronize()
    kernels = sorted(profile.key_averages(), key=lambda kernel: -kernel.self_device_time_total)
    total = sum(kernel.self_device_time_total for kernel in kernels)
    print(f"{name}: {total / 1e3:.2f} ms in {sum(kernel.count for kernel in kernels)} kernels")
    for kernel in kernels[:15]:
        print(f"{kernel.self_device_time_total / total:6.1%} {kernel.count:4}× {kernel.key[:100]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="resnet50")
    parser.add_argument("--sparsity", type=float, default=0.7)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--multiples", type=int, nargs="+", default=[1, 8, 16, 32], help="of channels in shrunk layers")
    parser.add_argument("--calls", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--profile", action="store_true", help="on a GPU: also list the kernels that take the most time")
    given = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu":
        torch.set_num_threads(1)
    torch.manual_seed(0)
    example = torch.randn(1, 3, given.size, given.size)
    dense = without_channels(models.build(given.model, 1000), given.sparsity, example)
    shrunk = {f"multiples of {multiple}": optg.shrink(dense, example, multiple=multiple) for multiple in given.multiples}
    candidates = {"dense": dense, **shrunk}
    images = torch.randn(given.batch, 3, given.size, given.size).to(device, memory_format=torch.channels_last)
    images = images.bfloat16() if device.type == "cuda" else images
    calls = {name: prepare(model, images) for name, model in candidates.items()}
    times: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(given.rounds + 1):  # the first turn compiles
        for name, call in calls.items():
            measured = seconds(call, given.calls if turn else 3, device)
            times[name] += [measured / given.calls] if turn else []
    flops = {name: count(model, example).dense_flops for name, model in candidates.items()}
    moved = {name: activations(model, example) * given.batch * images.element_size() for name, model in candidates.items()}
    before = statistics.median(times["dense"])
    print(f"{'model':15} {'ms':>9} {'images/s':>9} {'speed-up':>9} {'FLOPs':>8} {'share':>6}  traffic")
    for name, found in times.items():
        median, promised = statistics.median(found), flops["dense"] / flops[name]
        print(
            f"{name:15} {1e3 * median:9.2f} {given.batch / median:9,.0f} {before / median:9.2f} {f'1/{promised:.2f}':>8} "
            f"{before / median / promised:6.0%}  {moved[name] / 1e9:.3f} GB, 1/{moved['dense'] / moved[name]:.2f}"
        )
    if given.profile and device.type == "cuda":
        for name, call in calls.items():
            show_kernels(name, call)


if __name__ == "__main__":
    main()
