"""Carry out `optg bench`: measure, print a table, write JSON and a plot."""

from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import torch

import optg
from optg.deploy.bench.engines import Engine, select_engines
from optg.deploy.bench.measure import MeasureRequest, measure_in_own_process
from optg.deploy.bench.plot import check_plot_suffix, plot_benchmark
from optg.deploy.bench.results import Benchmark, speedup_lines, write_json
from optg.deploy.bench.subject import Subject, describe_subject, open_subject
from optg.deploy.bench.table import benchmark_table
from optg.files import require_folder
from optg.machine import cores, cpu_name

if TYPE_CHECKING:
    from rich.console import Console


def run_benchmark(
    subject: Subject,
    engines: list[str],
    batches: list[int],
    threads: list[int],
    seconds: float,
    output: Path | None,
    plot: Path | None,
    console: "Console",
) -> None:
    """Measure the subject, print the results, and write them to `output` and `plot` if given."""
    if plot:
        check_plot_suffix(plot)
    for path in (output, plot):
        if path:
            require_folder(path)
    benchmark = measure_all(subject, engines, batches, threads or sorted({1, cores()}), seconds, console)
    console.print(benchmark_table(benchmark))
    for line in (*speedup_lines(benchmark), *benchmark.notes):
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    if output:
        write_json(benchmark, output)
    if plot:
        plot_benchmark(benchmark, plot)


def measure_all(
    subject: Subject, engines: list[str], batches: list[int], threads: list[int], seconds: float, console: "Console"
) -> Benchmark:
    """Check the arguments, then measure each number of threads in its own process."""
    chosen = select_engines(engines)
    for name, numbers in (("--batches", batches), ("--threads", threads)):
        if not numbers or min(numbers) < 1:
            raise ValueError(f"{name} is {' '.join(map(str, numbers)) or 'empty'}; expected numbers of at least 1")
    if not seconds > 0:
        raise ValueError(f"--seconds is {seconds:g}; expected above 0")
    packages = {package: version(package) for package in ("torch", "onnxruntime", "openvino") if find_spec(package)}
    versions = {"optg": optg.__version__, **packages}
    benchmark = Benchmark(describe_subject(open_subject(subject)), describe_hardware(chosen), versions)
    for count in threads:
        with console.status(f"measuring with {count} thread{'s' if count > 1 else ''} …"):
            timings, notes = measure_in_own_process(MeasureRequest(subject, engines, batches, count, seconds))
        benchmark.timings += timings
        benchmark.notes += [note for note in notes if note not in benchmark.notes]
    return benchmark


def describe_hardware(engines: list[Engine]) -> str:
    """Return the processor's name and its number of cores, and the GPU if one of these engines uses it."""
    gpu = f", {torch.cuda.get_device_name()}" if any(engine.needs_gpu for engine in engines) else ""
    return f"{cpu_name()}, {cores()} core{'s' if cores() > 1 else ''}{gpu}"
