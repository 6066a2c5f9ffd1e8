"""Time engines with one number of threads, in this process or in one of its own."""

import json
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor

from optg.deploy.bench.engines import EngineInputs, Network, select_engines
from optg.deploy.bench.results import Timing
from optg.deploy.bench.subject import Subject, float_and_int8, open_subject
from optg.deploy.onnx import write_onnx

MIN_ROUNDS = 5  # turns that each engine gets at least
TURN_SECONDS = 0.05


@dataclass
class MeasureRequest:
    """One measurement: the engines by name (none: all), at each batch size, for so many seconds each."""

    subject: Subject
    engines: list[str]
    batches: list[int]
    threads: int
    seconds: float


def measure(request: MeasureRequest) -> tuple[list[Timing], list[str]]:
    """Measure in this process. Return the timings, and notes about engines that are missing or failed."""
    torch.set_num_threads(request.threads)
    trained, timings, notes = open_subject(request.subject), list[Timing](), list[str]()
    model, int8 = float_and_int8(trained)
    with tempfile.TemporaryDirectory() as folder, torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        onnx = Path(folder) / "model.onnx"
        selected = select_engines(request.engines)
        engines = [engine for engine in selected if not [p for p in engine.packages if find_spec(p) is None]]
        notes += [f"{e.name} is not installed: pip install {' '.join(e.packages)}" for e in selected if e not in engines]
        if any(engine.needs_onnx for engine in engines):
            try:
                write_onnx(onnx, model, trained.example)
            except ValueError as error:
                notes.append(str(error))
                engines = [engine for engine in engines if not engine.needs_onnx]
        for batch in request.batches:
            images = torch.randn(batch, *trained.about.shape, generator=torch.Generator().manual_seed(batch))
            expected, networks = model(images), dict[str, Network]()
            for engine in engines:
                try:
                    network = engine.prepare(EngineInputs(model, images, request.threads, onnx, int8))
                    warm_up(network, images)
                    networks[engine.name] = network
                except Exception as error:  # a failing engine must not stop the others
                    reason = next(iter(str(error).strip().splitlines()), "")
                    notes.append(f"{engine.name} failed at batch {batch}: {type(error).__name__}: {reason}")
            timings += time_in_turns(networks, images, expected, request.threads, request.seconds)
    return timings, notes


def warm_up(network: Network, images: Tensor) -> None:
    """Call the network at least three times and for a quarter of a second."""
    start, calls = time.perf_counter(), 0
    while calls < 3 or time.perf_counter() - start < 0.25:
        network(images)
        calls += 1


def time_in_turns(
    networks: dict[str, Network], images: Tensor, expected: Tensor, threads: int, seconds: float
) -> Iterator[Timing]:
    """Give every engine a turn per round, in random order, until each has had this many seconds."""
    times: dict[str, list[float]] = {name: [] for name in networks}
    order, rng, start, rounds = list(networks), random.Random(0), time.perf_counter(), 0
    while rounds < MIN_ROUNDS or time.perf_counter() - start < seconds * len(order):
        rng.shuffle(order)
        for name in order:
            times[name] += time_one_turn(networks[name], images)
        rounds += 1
    for name, network in networks.items():
        low, median, high = statistics.quantiles(times[name], n=4)
        difference = float((network(images) - expected).abs().max() / expected.abs().max())
        yield Timing(name, threads, len(images), median, low, high, len(times[name]), difference)


def time_one_turn(network: Network, images: Tensor) -> list[float]:
    """Return milliseconds per call over one turn. The first call is not timed: another engine's data fills the caches."""
    network(images)
    times, start = list[float](), time.perf_counter()
    while not times or time.perf_counter() - start < TURN_SECONDS:
        begin = time.perf_counter()
        network(images)
        times.append(1000 * (time.perf_counter() - begin))
    return times


def measure_in_own_process(request: MeasureRequest) -> tuple[list[Timing], list[str]]:
    """Measure in a new process, where no library has fixed its number of threads yet."""
    with tempfile.TemporaryDirectory() as folder:
        answer, threads = Path(folder) / "answer.json", str(request.threads)
        environment = {**os.environ, "OMP_NUM_THREADS": threads, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        command = [sys.executable, "-P", "-m", "optg.deploy.bench", json.dumps(asdict(request)), str(answer)]
        child = subprocess.run(command, env=environment, capture_output=True)
        if child.returncode or not answer.exists():
            lines = child.stderr.decode(errors="replace").strip().splitlines() or ["no error message"]
            error = next((line for line in reversed(lines) if re.match(r"[\w.]+: ", line)), lines[-1])
            raise ValueError(f"the measuring process with {threads} threads ended with code {child.returncode}: {error}")
        timings, notes = json.loads(answer.read_text())
    return [Timing(**timing) for timing in timings], notes
