"""Table, summary and plot show what was measured."""

from dataclasses import replace
from io import StringIO
from pathlib import Path

from rich.console import Console

from optg.deploy.bench.plot import plot_benchmark
from optg.deploy.bench.results import Benchmark, Timing, speedup_lines
from optg.deploy.bench.table import benchmark_table


def timing(engine: str, milliseconds: float, batch: int = 1, threads: int = 1) -> Timing:
    return Timing(engine, threads, batch, milliseconds, 0.9 * milliseconds, 1.2 * milliseconds, 7, 1e-7)


SUBJECT = {"name": "[a]", "packed_bytes": 2, "dense_bytes": 100, "parameters": 9, "nonzero": 3, "flops": 5, "dense_flops": 7}
BENCHMARK = Benchmark(
    SUBJECT,
    "a CPU, 2 cores",
    {"torch": "2"},
    [
        *(timing("optg", 1.0), timing("torch", 8.0), timing("onnxruntime", 3.0), timing("openvino bf16", 0.5)),
        *(timing("optg", 4.0, 32, 2), timing("torch", 2.0, 32, 2), timing("gpu bf16 shrunk", 0.1, 32, 2)),
    ],
)


def test_table_shows_the_timings() -> None:
    console = Console(width=80, record=True, file=StringIO())
    console.print(benchmark_table(BENCHMARK))
    text = console.export_text()
    assert "[a]: 0.000 MB packed, 2.00% of" in text and "3 of 9 parameters" in text and "a CPU, 2 cores" in text
    rows = [line.split() for line in text.splitlines()]
    assert ["optg", "1.000", "0.900–1.200", "1,000", "8.00", "1e-07"] in rows
    assert ["optg", "4.000", "3.600–4.800", "8,000", "0.50", "1e-07"] in rows
    assert list(speedup_lines(BENCHMARK)) == [  # bf16 does not count as the best other
        "batch 1, 1 thread: optg is 3.00 × as fast as onnxruntime, the best other engine in float32",
        "batch 32, 2 threads: optg is 0.50 × as fast as torch, the best other engine in float32",
    ]


def test_engines_are_compared_within_their_precision() -> None:
    timings = [timing(name, ms) for name, ms in (("optg", 4), ("optg int8", 1), ("onnxruntime int8", 3), ("torch", 6))]
    assert list(speedup_lines(replace(BENCHMARK, timings=timings))) == [
        "batch 1, 1 thread: optg is 1.50 × as fast as torch, the best other engine in float32",
        "batch 1, 1 thread: optg int8 is 3.00 × as fast as onnxruntime int8, the best other engine in int8",
    ]


def test_plot_is_one_valid_file(tmp_path: Path) -> None:
    plot_benchmark(BENCHMARK, tmp_path / "b.svg")
    assert (tmp_path / "b.svg").read_text().count("</svg>") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["b.svg"]
