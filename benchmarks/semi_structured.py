"""Measure whether 2:4 Linear layers pay on this GPU: time of dense and 2:4 products, for each shape and number of rows.

    python benchmarks/semi_structured.py [--features 1024 8192] [--rows 64 16384] [--output FILE.jsonl]

Rows are batch × tokens. All variants of one shape take turns in random order, a turn is `--calls` calls between two CUDA
events, and the table has the median time of a call over all turns. `pays` is the dense time divided by the 2:4 time, with the
quartiles over the turns. Both are given twice:

- as called from Python, eager or compiled, whichever is faster. For small shapes, this is the time that the CPU takes to start
  the GPU's work;
- in a CUDA graph of all calls of a turn, which the CPU starts at once. This is the time that the GPU takes.
"""

import argparse
import json
import random
import statistics
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path

import torch
from torch import Tensor, nn

from optg.deploy import semi_structured

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
GRAPH = " graph"  # ends the names of variants that run in a CUDA graph
Call = Callable[[Tensor], Tensor]


def two_four_layer(inputs: int, outputs: int, dtype: torch.dtype) -> nn.Linear:
    """Return a layer that keeps the two largest of every four weights."""
    layer = nn.Linear(inputs, outputs, dtype=dtype).cuda().requires_grad_(False)
    groups = layer.weight.view(outputs, -1, 4)
    groups.scatter_(2, groups.abs().topk(2, 2, largest=False).indices, 0)
    return layer


def variants(layer: nn.Linear, x: Tensor, repeats: int) -> dict[str, Call]:
    """Return the layer in all ways to run it, warmed up. A call of a graph stands for `repeats` calls of the layer."""
    sparse, layers = semi_structured(nn.Sequential(layer))
    if layers["0"] != "2:4":
        raise SystemExit(f"{layer} stays {layers['0']}")
    torch._dynamo.reset()
    ways: dict[str, Callable[[nn.Module], Call]] = {
        "": lambda module: module,
        " compiled": lambda module: torch.compile(module, dynamic=False),
        GRAPH: lambda module: in_graph(module, x, repeats),
    }
    working: dict[str, Call] = {}
    for way, (kind, module) in product(ways, (("dense", layer), ("2:4", sparse))):
        try:
            call = ways[way](module)
            for _ in range(10):
                call(x)
            torch.cuda.synchronize()
            working[kind + way] = call
        except Exception as error:  # a variant that this version of torch cannot run must not stop the others
            cause = error.__context__ or error  # of a failed capture, torch.cuda.graph reports only that it failed
            print(f"{kind}{way} fails: {type(cause).__name__}: {next(iter(str(cause).splitlines()), '')}")
            with suppress(RuntimeError):
                x[:1].abs()  # clears an error that the next kernel would report otherwise
    return working


def in_graph(module: nn.Module, x: Tensor, repeats: int) -> Call:
    """Capture several calls in one CUDA graph. Return a function that runs them on this same input."""
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # torch.cuda.graph does not leave its stream if the capture fails; this does
        for _ in range(3):
            module(x)
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(repeats):
                output = module(x)

    def replay(_: Tensor) -> Tensor:
        graph.replay()
        return output

    return replay


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
            for _ in range(1 if name.endswith(GRAPH) else repeats):
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
    dense: str  # the fastest dense variant without a CUDA graph
    sparse: str  # the fastest 2:4 variant without a CUDA graph
    pays: float  # how many times as fast the 2:4 one is
    quartiles: tuple[float, float]
    error: float  # largest difference from the dense output, relative to the largest output
    graph_pays: float | None = None  # the same in a CUDA graph; None if not measured
    graph_quartiles: tuple[float, float] | None = None

    def __str__(self) -> str:
        called = self.columns(self.dense, self.sparse, self.pays, self.quartiles)
        graph = f"{'not measured':>39}"
        if self.graph_pays is not None and self.graph_quartiles is not None:
            graph = self.columns("dense" + GRAPH, "2:4" + GRAPH, self.graph_pays, self.graph_quartiles)
        shape = f"{self.inputs:7} {self.outputs:7} {self.rows:6}"
        return f"{shape} │{called} │{graph} │ {self.error:.1e}  {self.dense}, {self.sparse}"

    def columns(self, dense: str, sparse: str, pays: float, quartiles: tuple[float, float]) -> str:
        between = f"{quartiles[0]:.2f}–{quartiles[1]:.2f}"
        return f"{self.microseconds[dense]:9.1f} {self.microseconds[sparse]:9.1f} {pays:6.2f} {between:>12}"


COLUMNS = f"{'dense':>9} {'2:4':>9} {'pays':>6} {'quartiles':>12}"
HEADER = f"""{"":22} │{"as called":^39} │{"in a CUDA graph":^39} │
{"inputs":>7} {"outputs":>7} {"rows":>6} │{COLUMNS} │{COLUMNS} │ error    fastest variants"""


def speed_up(dense: list[float], sparse: list[float]) -> tuple[float, tuple[float, float]]:
    """Return the median of dense time divided by 2:4 time over all turns, and the quartiles."""
    low, middle, high = statistics.quantiles([a / b for a, b in zip(dense, sparse)], n=4)
    return middle, (low, high)


def measure(inputs: int, outputs: int, rows: int, options: argparse.Namespace) -> Result:
    """Measure one shape. Numbers are drawn on the CPU: a failed capture may leave the GPU's generator unusable."""
    dtype = DTYPES[options.dtype]
    layer, x = two_four_layer(inputs, outputs, dtype), torch.randn(rows, inputs, dtype=dtype).cuda()
    calls = variants(layer, x, options.calls)
    expected = layer(x).float()
    error = max(float((call(x).float() - expected).abs().max() / expected.abs().max()) for call in calls.values())
    times = time_in_turns(calls, x, options.turns, options.calls)
    medians = {name: statistics.median(found) for name, found in times.items()}
    called = [name for name in times if not name.endswith(GRAPH)]
    dense, sparse = (min((n for n in called if n.startswith(kind)), key=medians.__getitem__) for kind in ("dense", "2:4"))
    graphs = [times[kind + GRAPH] for kind in ("dense", "2:4") if kind + GRAPH in times]
    in_graphs = speed_up(*graphs) if len(graphs) == 2 else (None, None)
    pays, quartiles = speed_up(times[dense], times[sparse])
    return Result(inputs, outputs, rows, options.dtype, medians, dense, sparse, pays, quartiles, error, *in_graphs)


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
    print(HEADER)
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
    called = [result.quartiles for result in results]
    graphs = [result.graph_quartiles for result in results if result.graph_quartiles is not None]
    for found, way in ((called, "as called"), (graphs, "in a CUDA graph")):
        print(f"2:4 pays for {sum(low > 1 for low, _ in found)} of {len(found)} shapes {way} (lower quartile above 1)")


if __name__ == "__main__":
    main()
