"""Compare int8 engines on this CPU, by time on the clock and by CPU time, which other processes disturb less.

    python benchmarks/int8.py --model resnet50 --sparsity 0.9 0.95 0.98
    python benchmarks/int8.py --model resnet50 --sparsity 0.9 --engines "optg int8" --layers

Models are those of inference.py: random weights, and as many zeros in each layer as give the FLOPs of OptG's masks. Engines
take turns. The table shows the times of a call in ms: the shortest, and the median. --layers prints the shortest time of
each layer in optg, its multiply-adds per second, and the time that its instructions need at least on a --core of --ghz.
--structure 1x4 removes blocks of weights instead of single ones.
"""

import argparse
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from inference_layers import FLOPS, SIZES, optg_power, settle, sparsify

from optg.deploy.bench.engines import EngineInputs, select_engines
from optg.deploy.onnx import write_onnx
from optg.models import build

ENGINES = ["optg int8", "openvino int8", "onnxruntime int8", "optg"]
# Measured: vector instructions in a cycle, and the cycles of an aligned and of an unaligned load of 64 bytes.
CORES = {"zen4": (2.0, 1.0, 1.5), "zen5": (4.0, 0.5, 1.0)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="resnet50", choices=list(SIZES))
    parser.add_argument("--sparsity", type=float, nargs="+")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--engines", nargs="+", default=ENGINES)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--layers", action="store_true")
    parser.add_argument("--core", choices=list(CORES), default="zen4", help="for the bounds of --layers")
    parser.add_argument("--ghz", type=float, default=3.7, help="clock of the core, for the bounds of --layers")
    parser.add_argument("--structure", choices=["unstructured", "1x2", "1x4"], default="unstructured")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    classes, size = SIZES[options.model]
    for sparsity in options.sparsity or FLOPS[options.model]:
        torch.manual_seed(0)
        power, block = optg_power(options.model, sparsity), {"1x2": 2, "1x4": 4}.get(options.structure, 1)
        model = settle(sparsify(build(options.model, classes), sparsity, power, block=block)).eval()
        images = torch.randn(options.batch, 3, size, size)
        with tempfile.TemporaryDirectory() as folder, torch.no_grad():
            onnx = Path(folder) / "model.onnx"
            write_onnx(onnx, model, images[:1])
            inputs = EngineInputs(model, images, options.threads, onnx)
            networks = {engine.name: engine.prepare(inputs) for engine in select_engines(options.engines)}
            print(f"{options.model} at {sparsity:.0%}, {options.structure}, batch {options.batch}, {options.threads} thread(s)")
            compare(networks, images, options.rounds)
            if options.layers:
                profile(networks["optg int8"], images, options.core, options.ghz)


def compare(networks: dict[str, Any], images: torch.Tensor, rounds: int) -> None:
    """Let the engines take turns of a few calls, and print their times."""
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in networks}
    order = list(networks)
    for _ in range(rounds):
        random.shuffle(order)
        for name in order:
            networks[name](images)
            for _ in range(5):
                clock, cpu = time.perf_counter(), time.process_time()
                networks[name](images)
                times[name].append((1000 * (time.perf_counter() - clock), 1000 * (time.process_time() - cpu)))
    for name, values in times.items():
        columns = ((kind, [value[i] for value in values]) for i, kind in enumerate(("clock", "CPU")))
        text = (f"{kind} {min(column):8.3f} ms, median {statistics.median(column):8.3f}" for kind, column in columns)
        print(f"  {name:18s} {'    '.join(text)}")


def profile(fast: Any, images: torch.Tensor, core: str, ghz: float) -> None:
    """Print the shortest time of each step, and the bounds of layers."""
    for part in fast.network.parts:
        for program in part.programs.values():
            shortest = np.full(len(program.steps), np.iinfo(np.int64).max)
            for _ in range(100):
                fast.runner.times[program] = taken = np.zeros(len(program.steps), np.int64)
                fast(images)
                shortest = np.minimum(shortest, np.where(taken > 0, taken, shortest))
            fast.runner.times.clear()
            bounds = [bound(call, part.shapes, program.images, core) / ghz for call in program.steps]
            print(f"  all steps: {shortest.sum() / 1e6:.3f} ms, bound of the layers {sum(bounds) / 1e6:.3f} ms")
            for call, nanoseconds, least in zip(program.steps, shortest, bounds):
                print("  " + describe(call, int(nanoseconds), least, part.shapes, program.images))


def bound(call: Any, shapes: dict[str, tuple[int, int, int]], images: int, core: str) -> float:
    """Return the cycles that a layer's products, loads and results need at least, if all its data is in the first cache.

    On planes, 4 taps at 64 positions take 4 loads, 4 multiply-adds, and 8 interleaves: 4 with blocks of 2 channels, none with
    blocks of 4. On pixels, a pick of 64 weights takes a permutation and a multiply-add.
    """
    if not getattr(call.op, "nonzero", 0):
        return 0.0
    channels, height, width = shapes[call.op.output]
    a_cycle, aligned, shifted = CORES[core]
    products = call.op.nonzero * height * width * images
    results = channels * height * width * images / 64
    added = len(call.op.inputs) > 1
    if call.function == "int8_pixels":
        return products / 64 + results * (48 if added else 24) / a_cycle  # 16 results at a time
    loads = 4 * (aligned if call.op.window.kernel == (1, 1) else shifted)
    instructions = {1: 12, 2: 8, 4: 4}[call.block]
    return max(products / 256 * instructions + results * (21 if added else 7), products / 256 * loads * a_cycle) / a_cycle


def describe(call: Any, nanoseconds: int, least: float, shapes: dict[str, tuple[int, int, int]], images: int) -> str:
    text = f"{call.function:18s} {nanoseconds / 1e6:8.4f} ms"
    if not getattr(call.op, "nonzero", 0):
        return text
    channels, height, width = shapes[call.op.output]
    work = call.op.nonzero * height * width * images
    layer = f"{call.op.name:30s} {channels}×{height}×{width}, density {call.op.nonzero / call.op.weight.size:.1%}"
    tile = f", tile {'×'.join(map(str, call.choice))}" if call.choice else ""
    return f"{text}, bound {least / 1e6:6.4f}  {work / nanoseconds:6.1f} GMAC/s  {layer}{tile}"


if __name__ == "__main__":
    main()
