"""Show where the time of sparse inference goes: each step of the engine, in the network and alone, against the CPU's peak.

    python benchmarks/inference_layers.py --model resnet50 --sparsity 0.9 --batch 1 --threads 1

The masks are random. A layer's density is proportional to its ERK density to a power; the default power gives the model as many
FLOPs as OptG leaves. --power 0 is uniform, --power 1 is ERK.
"""

import argparse

import numpy as np
import torch
from torch import nn

import optg
from optg.core import accounting
from optg.core import budgets as allocation
from optg.core.ranking import zeros_at
from optg.deploy.engine import structs
from optg.deploy.engine.plan import split
from optg.models import build

PEAK = 58.0  # GMAC/s of one core, with all operands in registers or the first cache
FLOPS = {  # after OptG: Tables 2 and 3 of the paper; VGG-19's from RESULTS.md
    "resnet50": {0.9: 342e6, 0.95: 221e6, 0.98: 126e6},
    "mobilenet_v1": {0.8: 124e6, 0.9: 80e6},
    "vgg19": {0.9: 40e6, 0.95: 27.8e6, 0.98: 19.7e6},
}
SIZES = {"resnet50": (1000, 224), "mobilenet_v1": (1000, 224), "vgg19": (10, 32)}


def kept_by(shapes: list[torch.Size], sparsity: float, power: float) -> list[int]:
    """Return how many weights each layer keeps; its density is proportional to its ERK density to this power."""
    sizes = [shape.numel() for shape in shapes]
    shares = [share**power for share in allocation.erk(shapes)]
    return allocation.fill(shares, sizes, sum(sizes) - zeros_at(sparsity, sum(sizes)))


def sparsify(model: nn.Module, sparsity: float, power: float, seed: int = 0, block: int = 1) -> nn.Module:
    """Apply random masks; a layer's density is proportional to its ERK density to this power.

    Args:
        block: input channels that are removed together, where their number is a multiple of it.
    """
    generator = torch.Generator().manual_seed(seed)
    weights = [m.weight for m in model.modules() if isinstance(m, (nn.Conv2d, nn.Linear))]
    shapes = [w.shape for w in weights]
    with torch.no_grad():
        for weight, k in zip(weights, kept_by(shapes, sparsity, power)):
            size = block if weight.shape[1] % block == 0 else 1
            mask = torch.zeros(weight.numel() // size)
            mask[torch.randperm(mask.numel(), generator=generator)[: k // size]] = 1
            filters, channels, *kernel = weight.shape
            blocks = mask.view(filters, channels // size, 1, *kernel).expand(-1, -1, size, *[-1] * len(kernel))
            weight *= blocks.reshape(weight.shape)
    return model


def optg_power(name: str, sparsity: float) -> float:
    """Find the power that leaves as many FLOPs as OptG does, by bisection; return 0.5 if that number is not known."""
    if sparsity not in FLOPS[name]:
        return 0.5
    classes, size = SIZES[name]
    account = accounting.count(build(name, classes), torch.zeros(1, 3, size, size))
    shapes = [torch.Size(layer.shape) for layer in account.layers]
    low, high = -2.0, 2.0
    for _ in range(30):
        power = (low + high) / 2
        flops = sum(k * layer.positions for k, layer in zip(kept_by(shapes, sparsity, power), account.layers))
        low, high = (power, high) if flops < FLOPS[name][sparsity] else (low, power)
    return power


def settle(model: nn.Module) -> nn.Module:
    """Give norms the statistics of a trained model, so that activations neither vanish nor explode."""
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.normal_(0, 0.1)
            module.running_var.uniform_(0.5, 1.5)
    return model.eval()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="resnet50", choices=list(SIZES))
    parser.add_argument("--sparsity", type=float, default=0.9)
    parser.add_argument("--power", type=float)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--runs", type=int, default=20)
    options = parser.parse_args()
    classes, size = SIZES[options.model]
    torch.manual_seed(0)
    torch.set_num_threads(options.threads)
    power = optg_power(options.model, options.sparsity) if options.power is None else options.power
    model = settle(sparsify(build(options.model, classes), options.sparsity, power))
    x = torch.randn(options.batch, 3, size, size)
    fast = optg.compile(model, x, threads=options.threads)
    print(f"{options.model}, {options.sparsity:.0%} zeros, power {power:.2f}, batch {options.batch}, {options.threads} threads")
    report(fast, x, options.runs)


def report(fast: "optg.deploy.compile.Compiled", x: torch.Tensor, runs: int) -> None:
    fast(x)
    segments = [part for part in fast.network.parts if hasattr(part, "programs")]
    programs = [program for segment in segments for program in segment.programs.values()]
    rows = {program: [] for program in programs}
    for _ in range(runs):
        fast.runner.times = {program: np.zeros(len(program.steps), np.int64) for program in programs}
        fast(x)
        for program, times in fast.runner.times.items():
            rows[program].append(times)
    fast.runner.times = {}
    names = ("output", "density", "tile", "MMAC", "ms", "alone", "GMAC/s", "of peak")
    print(f"{'layer':30}" + "".join(f" {name:>{width}}" for name, width in zip(names, (12, 8, 9, 8, 8, 8, 7, 8))))
    total = macs = 0.0
    _, arena = structs.arena(max(program.size for program in programs))
    inputs = structs.pointers([])
    all_groups = dict(split(len(x), fast.library.lanes))
    for program in programs:
        groups = -(-all_groups[program.images] // fast.threads)  # groups of the first thread
        for i, step in enumerate(program.steps):
            ms = float(np.median([times[i] for times in rows[program]])) / 1e6
            total += ms
            if (tiling := step.choice) is None:
                if ms > 0.01:
                    print(f"{step.label:30} {'':>12} {'':>8} {'':>9} {'':>8} {ms:8.3f}")
                continue
            alone = fast.library.c.engine_time(structs.address(step.c), arena, structs.address(inputs), 0, 5) / 1e6
            op, shape = step.op, program.segment.shapes[step.op.output]
            work = op.nonzero * shape[1] * shape[2] * groups * program.images / 1e6
            alone *= groups * (program.images if i < program.border else 1)
            macs += work
            tile = "×".join(map(str, tiling[:3])) + "t" * tiling.trimmed + "o" * tiling.outside
            tile += f"/{tiling.parts}" * (tiling.parts > 1)
            print(
                f"{op.name:30} {'×'.join(map(str, shape)):>12} {op.nonzero / op.weight.size:8.2%} {tile:>9} {work:8.2f}"
                f" {ms:8.3f} {alone:8.3f} {work / ms:7.1f} {work / ms / PEAK:8.0%}"
            )
    rate = macs / total
    print(f"{'total':30} {'':>12} {'':>8} {'':>9} {macs:8.1f} {total:8.3f} {'':>8} {rate:7.1f} {rate / PEAK:8.0%}")


if __name__ == "__main__":
    main()
