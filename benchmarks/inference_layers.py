"""Where the time of sparse inference goes: each step of the engine, in sequence and alone, against the floor.

    python benchmarks/inference_layers.py --model resnet50 --sparsity 0.9 --batch 1 --threads 1

The masks are random, with a layer's density ∝ ERK's to a power: by default the one that gives the model the FLOPs it has under
OptG. --power 0 is uniform, --power 1 is ERK.
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
from optg.deploy.engine.net import Conv
from optg.models import build

FLOOR = 58.0  # GMAC/s of one core, all operands in registers or the first cache
FLOPS = {  # under OptG: Tables 2 and 3 of the paper; VGG-19's in RESULTS.md
    "resnet50": {0.9: 342e6, 0.95: 221e6, 0.98: 126e6},
    "mobilenet_v1": {0.8: 124e6, 0.9: 80e6},
    "vgg19": {0.9: 40e6, 0.95: 27.8e6, 0.98: 19.7e6},
}
SIZES = {"resnet50": (1000, 224), "mobilenet_v1": (1000, 224), "vgg19": (10, 32)}


def kept_by(shapes: list[torch.Size], sparsity: float, power: float) -> list[int]:
    """How many weights each layer keeps; its density ∝ its ERK density to this power."""
    sizes = [shape.numel() for shape in shapes]
    shares = [share**power for share in allocation.erk(shapes)]
    return allocation.fill(shares, sizes, sum(sizes) - zeros_at(sparsity, sum(sizes)))


def sparsify(model: nn.Module, sparsity: float, power: float, seed: int = 0) -> nn.Module:
    """Random masks; a layer's density ∝ its ERK density to this power."""
    generator = torch.Generator().manual_seed(seed)
    weights = [m.weight for m in model.modules() if isinstance(m, (nn.Conv2d, nn.Linear))]
    shapes = [w.shape for w in weights]
    with torch.no_grad():
        for weight, k in zip(weights, kept_by(shapes, sparsity, power)):
            mask = torch.zeros(weight.numel())
            mask[torch.randperm(weight.numel(), generator=generator)[:k]] = 1
            weight *= mask.view_as(weight)
    return model


def optg_power(name: str, sparsity: float) -> float:
    """The power that gives the model the FLOPs it has under OptG, by bisection; 0.5 where they are not known."""
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
    """Norms as after training, so that values neither vanish nor explode."""
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
    programs = [program for part in fast.parts if hasattr(part, "programs") for program in part.programs.values()]
    rows = {program: [] for program in programs}
    for _ in range(runs):
        fast.times = {program: np.zeros(len(program.steps), np.int64) for program in programs}
        fast(x)
        for program, times in fast.times.items():
            rows[program].append(times)
    fast.times = None
    names = ("output", "density", "tile", "MMAC", "ms", "alone", "GMAC/s", "of floor")
    print(f"{'layer':30}" + "".join(f" {name:>{width}}" for name, width in zip(names, (12, 8, 9, 8, 8, 8, 7, 8))))
    total = macs = 0.0
    _, arena = structs.arena(max(program.size for program in programs))
    inputs = structs.pointers([])
    for program in programs:
        border = program.border if program.cut else 0
        for i, step in enumerate(program.steps):
            op, label = program.labels[i]
            images = x.shape[0] // program.images * program.images
            ms = float(np.median([times[i] for times in rows[program]])) / 1e6
            groups = max(1, -(-(images // program.images) // fast.threads))  # the first thread's
            total += ms
            if not isinstance(op, Conv):
                if ms > 0.01:
                    print(f"{label or type(op).__name__:30} {'':>12} {'':>8} {'':>9} {'':>8} {ms:8.3f}")
                continue
            alone = fast.library.c.engine_time(structs.address(step), arena, structs.address(inputs), 0, 5) / 1e6
            shape = program.segment.shapes[op.output]
            work = op.nonzero * shape[1] * shape[2] * groups * program.images / 1e6
            alone *= groups * (program.images if i < border else 1)
            macs += work
            tiling = program.tilings[op.output]
            tile = "×".join(map(str, tiling[:3])) + "t" * tiling.trimmed + "o" * tiling.outside
            tile += f"/{tiling.parts}" * (tiling.parts > 1)
            print(
                f"{op.name:30} {'×'.join(map(str, shape)):>12} {op.nonzero / op.weight.size:8.2%} {tile:>9} {work:8.2f}"
                f" {ms:8.3f} {alone:8.3f} {work / ms:7.1f} {work / ms / FLOOR:8.0%}"
            )
    rate = macs / total
    print(f"{'together':30} {'':>12} {'':>8} {'':>9} {macs:8.1f} {total:8.3f} {'':>8} {rate:7.1f} {rate / FLOOR:8.0%}")


if __name__ == "__main__":
    main()
