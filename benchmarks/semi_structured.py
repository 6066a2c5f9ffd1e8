"""Measure whether 2:4 Linear layers pay on this GPU: time of dense and 2:4 products, for each shape and number of rows.

    python benchmarks/semi_structured.py [--features 1024 8192] [--rows 64 16384] [--output FILE.jsonl]

Rows are batch × tokens. All variants of one shape take turns in random order, a turn is `--calls` calls between two CUDA
events, and the table has the median time of a call over all turns, eager or compiled, whichever is faster. `pays` is the
dense time divided by the 2:4 time, with the quartiles over the turns.
"""

import argparse
import json
import random
import statistics
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path

import torch
from torch import Tensor, nn

from optg.deploy import semi_structured

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
Call = Callable[[Tensor], Tensor]


def two_four_layer(inputs: int, outputs: int, dtype: torch.dtype) -> nn.Linear:
    """Return a layer that keeps the two largest of every four weights."""
    layer = nn.Linear(inputs, outputs, device="cuda", dtype=dtype).requires_grad_(False)
    groups = layer.weight.view(outputs, -1, 4)
    groups.scatter_(2, groups.abs().topk(2, 2, largest=False).indices, 0)
    return layer


def variants(layer: nn.Linear, x: Tensor) -> dict[str, Call]:
    """Return the layer in all ways to run it, warmed up."""
    sparse, layers = semi_structured(nn.Sequential(layer))
    if layers["0"] != "2:4":
        raise SystemExit(f"{layer} stays {layers['0']}")
    torch._dynamo.reset()
    calls: dict[str, Call] = {"dense": layer, "2:4": sparse}
    calls |= {f"{name} compiled": torch.compile(module, dynamic=False) for name, module in [*calls.items()]}
    working: dict[str, Call] = {}
    for name, call in calls.items():
        try:
            for _ in range(10):
                call(x)
            torch.cuda.synchronize()
            working[name] = call
        except Exception as error:  # a variant that this version of torch cannot compile must not stop the others
            print(f"{name} fails: {type(error).__name__}: {next(iter(str(error).splitlines()), '')}")
    return working


def time_in_turns(calls: dict[str, Call], x: Tensor, turns: int, repeats: int) -> dict[str, list[float]]:
    """Return microseconds per call, one number for each turn."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    order, rng = list(calls), random.Random(0)
    for _ in range(turns):
        rng.shuffle(order)
        for name in order:
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            calls[name](x)  # not timed: another variant's data fills the caches
            start.record()
            for _ in range(repeats):
                calls[name](x)
            end.record()
            end.synchronize()
            times[name].append(1000 * start.elapsed_time(end) / repeats)
    return times


@dataclass
class Result:
    """The measurements of one shape."""

    inputs: int
    outputs: int
    rows: int
    dtype: str
    microseconds: dict[str, float]  # per call, of each variant
    dense: str  # the fastest dense variant
    sparse: str  # the fastest 2:4 variant
    pays: float  # how many times as fast the 2:4 one is
    quartiles: tuple[float, float]
    error: float  # largest difference from the dense output, relative to the largest output

    def __str__(self) -> str:
        dense, sparse = self.microseconds[self.dense], self.microseconds[self.sparse]
        return (
            f"{self.inputs:7} {self.outputs:7} {self.rows:6} {dense:9.1f} {sparse:9.1f} {self.pays:6.2f}  "
            f"{self.quartiles[0]:.2f}–{self.quartiles[1]:.2f}  {self.error:.1e}  {self.dense}, {self.sparse}"
        )


def measure(inputs: int, outputs: int, rows: int, options: argparse.Namespace) -> Result:
    """Measure one shape."""
    dtype = DTYPES[options.dtype]
    layer, x = two_four_layer(inputs, outputs, dtype), torch.randn(rows, inputs, device="cuda", dtype=dtype)
    calls = variants(layer, x)
    expected = layer(x).float()
    error = max(float((call(x).float() - expected).abs().max() / expected.abs().max()) for call in calls.values())
    times = time_in_turns(calls, x, options.turns, options.calls)
    medians = {name: statistics.median(found) for name, found in times.items()}
    dense, sparse = (min((n for n in medians if n.startswith(kind)), key=medians.__getitem__) for kind in ("dense", "2:4"))
    low, middle, high = statistics.quantiles([a / b for a, b in zip(times[dense], times[sparse])], n=4)
    return Result(inputs, outputs, rows, options.dtype, medians, dense, sparse, middle, (low, high), error)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--features", type=int, nargs="+", default=[1024, 2048, 4096, 8192], help="inputs and outputs")
    parser.add_argument("--rows", type=int, nargs="+", default=[64, 256, 1024, 4096, 16384], help="batch × tokens")
    parser.add_argument("--square", action="store_true", help="measure only layers with as many outputs as inputs")
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--calls", type=int, default=20, help="in each turn")
    parser.add_argument("--output", type=Path, help="JSON lines to add to; shapes that it has are not measured again")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("2:4 tensors need an NVIDIA GPU, and torch sees none")
    warnings.simplefilter("ignore")
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {options.dtype}; microseconds per call")
    print(f"{'inputs':>7} {'outputs':>7} {'rows':>6} {'dense':>9} {'2:4':>9} {'pays':>6}  quartiles  error    fastest variants")
    lines = options.output.read_text().splitlines() if options.output and options.output.exists() else []
    measured = [Result(**json.loads(line)) for line in lines]
    known = {(r.inputs, r.outputs, r.rows): r for r in measured if r.dtype == options.dtype}
    results = []
    for shape in product(options.features, options.features, options.rows):
        if options.square and shape[0] != shape[1]:
            continue
        with torch.no_grad():
            results.append(known.get(shape) or measure(*shape, options))
        print(results[-1], flush=True)
        if options.output and shape not in known:
            with options.output.open("a") as file:
                file.write(json.dumps(asdict(results[-1])) + "\n")
    paying = sum(result.quartiles[0] > 1 for result in results)
    print(f"2:4 pays for {paying} of {len(results)} shapes (lower quartile above 1)")


if __name__ == "__main__":
    main()
