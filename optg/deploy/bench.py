"""How fast a model runs on this CPU: optg against torch, torch.compile, onnxruntime and OpenVINO.

A number of threads is a process of its own, since some engines settle theirs once. Within it all engines are ready before
the first is timed, and take short turns, so that whatever else the machine does meets all of them alike.
"""

import inspect
import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor, nn

import optg
from optg import models
from optg.core.budgets import layer_zeros
from optg.core.prunable import find_prunable
from optg.deploy import packed
from optg.deploy.export import Trained, account_of, open_trained, to_onnx
from optg.deploy.graph import capture
from optg.deploy.packed import About
from optg.deploy.timings import Report, Timing, draw, table, verdicts, write_json
from optg.machine import cores, cpu_name
from optg.naming import nearest

Network = Callable[[Tensor], Tensor]
ROUNDS = 5  # at least: turns of each engine


@dataclass
class Subject:
    """What is measured."""

    what: str  # a run, a checkpoint, a packed file, or a model's name
    sparsity: float | None = None  # of a model that is given by name, whose masks are random; None: 0.9
    classes: int | None = None  # of such a model; None: as it is usually used
    shape: tuple[int, int, int] | None = None


# ---- what is measured


def open_subject(subject: Subject) -> Trained:
    path = Path(subject.what)
    if path.exists() or "/" in subject.what:
        if given := [name for name in ("sparsity", "classes", "shape") if getattr(subject, name) is not None]:
            raise ValueError(f"{path} is measured as it is; leave out --{given[0]}, which is for a model that is given by name")
        return open_trained(path)
    sparsity = 0.9 if subject.sparsity is None else subject.sparsity
    if not 0 <= sparsity < 1:
        raise ValueError(f"--sparsity is {sparsity:g}; expected at least 0 and below 1")
    classes = subject.classes or usual_classes(subject.what)
    shape = subject.shape or ((3, 224, 224) if classes == 1000 else models.small_images(subject.what))
    torch.manual_seed(0)
    model = models.build(subject.what, classes)
    prune_at_random(model, sparsity)
    with models.explain_shape_errors(subject.what, shape, "give another --shape"):
        settle_norms(model, shape)
    name = f"{subject.what} with random weights and random ERK masks of sparsity {sparsity:g}"
    return Trained(model.eval(), About(name, classes, shape, account=account_of(model, torch.zeros(1, *shape))))


def usual_classes(name: str) -> int:
    """1000 for ImageNet's models, 10 for those of small images."""
    if name not in models.MODELS:
        return 1000
    return inspect.signature(models.MODELS[name]).parameters["classes"].default


@torch.no_grad()
def prune_at_random(model: nn.Module, sparsity: float) -> None:
    """Zeros at random places, as many in each layer as the Erdős–Rényi-Kernel budget says."""
    weights = list(find_prunable(model, None, ()).values())
    for weight, zeros in zip(weights, layer_zeros("erk", [w.shape for w in weights], sparsity)):
        weight.view(-1)[torch.randperm(weight.numel())[:zeros]] = 0.0


@torch.no_grad()
def settle_norms(model: nn.Module, shape: tuple[int, ...]) -> None:
    """Let batch norms see some noise, so that activations have a usual size and do not shrink from layer to layer."""
    norms = [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    moments = {norm: norm.momentum for norm in norms}
    for norm in norms:
        norm.momentum = None  # the plain average
    model.train()
    model(torch.randn(4, *shape))
    for norm, momentum in moments.items():
        norm.momentum = momentum


def describe(trained: Trained) -> dict[str, Any]:
    """Name, size in bytes, non-zeros and FLOPs."""
    graph = capture(trained.model, trained.example)
    dense = sum(t.numel() * t.element_size() for t in graph.tensors.values())
    size = trained.path.stat().st_size if trained.path else len(packed.pack(graph, trained.about))
    return {"name": trained.about.name, "packed_bytes": size, "dense_bytes": dense, **trained.about.account}


# ---- the engines


@dataclass
class Engine:
    """A way to run a model: `prepare` makes a function of a batch of one size."""

    name: str
    prepare: Callable[["Place"], Network]
    packages: tuple[str, ...] = ()


@dataclass
class Place:
    """What an engine is given to prepare with."""

    trained: Trained
    example: Tensor  # of the batch's size
    threads: int
    onnx: Path


def as_optg(place: Place) -> Network:
    fast = optg.compile(place.trained.model, place.example, threads=place.threads)
    if fast.library is None:
        raise RuntimeError(fast.notes[0])
    return fast


def as_torch(place: Place) -> Network:
    return place.trained.model


def as_compiled(place: Place) -> Network:
    """With frozen weights, so that norms are folded and layouts chosen: the fastest form for inference."""
    torch._dynamo.reset()
    return torch.compile(place.trained.model, options={"freezing": True})


def as_onnxruntime(place: Place) -> Network:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = place.threads, 1
    options.add_free_dimension_override_by_name("batch", len(place.example))
    session = onnxruntime.InferenceSession(str(place.onnx), options, providers=["CPUExecutionProvider"])
    name = session.get_inputs()[0].name
    return lambda images: torch.from_numpy(session.run(None, {name: images.numpy()})[0])


def as_openvino(precision: str) -> Callable[[Place], Network]:
    def prepare(place: Place) -> Network:
        import openvino

        model = openvino.Core().read_model(place.onnx)
        model.reshape(list(place.example.shape))
        options = {
            "INFERENCE_PRECISION_HINT": precision,
            "INFERENCE_NUM_THREADS": place.threads,
            "NUM_STREAMS": 1,
            "PERFORMANCE_HINT": "LATENCY",
        }
        request = openvino.Core().compile_model(model, "CPU", options).create_infer_request()
        return lambda images: torch.from_numpy(request.infer([images.numpy()], share_inputs=True)[0])

    return prepare


ONNX = ("onnx", "onnxscript")
ENGINES = (
    Engine("optg", as_optg),
    Engine("torch", as_torch),
    Engine("torch.compile", as_compiled),
    Engine("onnxruntime", as_onnxruntime, (*ONNX, "onnxruntime")),
    Engine("openvino f32", as_openvino("f32"), (*ONNX, "openvino")),
    Engine("openvino bf16", as_openvino("bf16"), (*ONNX, "openvino")),
)


# ---- measuring


def chosen_engines(names: list[str]) -> list[Engine]:
    """Those of the names; by default all."""
    known = {engine.name: engine for engine in ENGINES}
    for name in names:
        if name not in known:
            raise ValueError(f"unknown engine {name!r}; {nearest(name, known)}")
    return [known[name] for name in names] or list(ENGINES)


def measure(
    subject: Subject, names: list[str], batches: list[int], threads: int, seconds: float
) -> tuple[list[Timing], list[str]]:
    """The engines at one number of threads, in this process."""
    torch.set_num_threads(threads)
    trained, timings, notes = open_subject(subject), list[Timing](), list[str]()
    with tempfile.TemporaryDirectory() as folder, torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        onnx = Path(folder) / "model.onnx"
        wanted = chosen_engines(names)
        engines = [engine for engine in wanted if not [p for p in engine.packages if find_spec(p) is None]]
        notes += [f"{e.name} is not installed: pip install {' '.join(e.packages)}" for e in wanted if e not in engines]
        if any(engine.packages for engine in engines):
            try:
                to_onnx(trained.model, trained.example, onnx)
            except ValueError as error:
                notes.append(str(error))
                engines = [engine for engine in engines if not engine.packages]
        for batch in batches:
            images = torch.randn(batch, *trained.about.shape, generator=torch.Generator().manual_seed(batch))
            expected, networks = trained.model(images), dict[str, Network]()
            for engine in engines:
                try:
                    network = engine.prepare(Place(trained, images, threads, onnx))
                    warm_up(network, images)
                    networks[engine.name] = network
                except Exception as error:  # one engine's trouble is not the others'
                    reason = next(iter(str(error).strip().splitlines()), "")
                    notes.append(f"{engine.name} failed at batch {batch}: {type(error).__name__}: {reason}")
            timings += time_in_turns(networks, images, expected, threads, seconds)
    return timings, notes


def warm_up(network: Network, images: Tensor) -> None:
    """At least three calls, and a quarter of a second."""
    start, calls = time.perf_counter(), 0
    while calls < 3 or time.perf_counter() - start < 0.25:
        network(images)
        calls += 1


def time_in_turns(
    networks: dict[str, Network], images: Tensor, expected: Tensor, threads: int, seconds: float
) -> Iterator[Timing]:
    """Give each engine a turn, in an order drawn anew each round, until each had so many seconds."""
    times: dict[str, list[float]] = {name: [] for name in networks}
    order, chance, start, rounds = list(networks), random.Random(0), time.perf_counter(), 0
    while rounds < ROUNDS or time.perf_counter() - start < seconds * len(order):
        chance.shuffle(order)
        for name in order:
            times[name] += turn(networks[name], images)
        rounds += 1
    for name, network in networks.items():
        low, median, high = statistics.quantiles(times[name], n=4)
        difference = float((network(images) - expected).abs().max() / expected.abs().max())
        yield Timing(name, threads, len(images), median, low, high, len(times[name]), difference)


def turn(network: Network, images: Tensor) -> list[float]:
    """Milliseconds of each call, for a twentieth of a second. The first, in caches full of another's data, does not count."""
    network(images)
    times, start = list[float](), time.perf_counter()
    while not times or time.perf_counter() - start < 0.05:
        begin = time.perf_counter()
        network(images)
        times.append(1000 * (time.perf_counter() - begin))
    return times


def bench(
    subject: Subject, names: list[str], batches: list[int], threads: list[int], seconds: float, console: Console
) -> Report:
    """Measure, each number of threads in a process of its own."""
    chosen_engines(names)
    for name, numbers in (("--batches", batches), ("--threads", threads)):
        if not numbers or min(numbers) < 1:
            raise ValueError(f"{name} is {' '.join(map(str, numbers)) or 'empty'}; expected numbers of at least 1")
    if not seconds > 0:
        raise ValueError(f"--seconds is {seconds:g}; expected above 0")
    packages = {package: version(package) for package in ("torch", "onnxruntime", "openvino") if find_spec(package)}
    report = Report(describe(open_subject(subject)), hardware(), {"optg": optg.__version__, **packages})
    for count in threads:
        with console.status(f"measuring with {count} thread{'s' if count > 1 else ''} …"):
            timings, notes = in_own_process(subject, names, batches, count, seconds)
        report.timings += timings
        report.notes += [note for note in notes if note not in report.notes]
    return report


def in_own_process(
    subject: Subject, names: list[str], batches: list[int], threads: int, seconds: float
) -> tuple[list[Timing], list[str]]:
    """`measure`, where nothing has settled on a number of threads yet."""
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "answer.json"
        request = json.dumps([asdict(subject), names, batches, threads, seconds, str(answer)])
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        command = [sys.executable, "-m", "optg.deploy.bench", request]
        child = subprocess.run(command, env=environment, capture_output=True)
        if child.returncode or not answer.exists():
            said = child.stderr.decode(errors="replace").strip().splitlines() or ["it said nothing"]
            error = next((line for line in reversed(said) if re.match(r"[\w.]+: ", line)), said[-1])
            raise ValueError(f"the process that measured with {threads} threads ended with code {child.returncode}: {error}")
        timings, notes = json.loads(answer.read_text())
    return [Timing(**timing) for timing in timings], notes


def answer(request: str) -> None:
    """What the process started by `in_own_process` does."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent hears it too, and ends this process
    subject, names, batches, threads, seconds, path = json.loads(request)
    timings, notes = measure(Subject(**subject), names, batches, threads, seconds)
    Path(path).write_text(json.dumps([[asdict(timing) for timing in timings], notes]))


def hardware() -> str:
    """Return the processor's name and its number of cores."""
    return f"{cpu_name()}, {cores()} core{'s' if cores() > 1 else ''}"


def check_plot(path: Path) -> Path:
    if path.suffix not in (".png", ".svg", ".pdf"):
        raise ValueError(f"--plot {path} should end in .png, .svg or .pdf")
    return path


def run(
    subject: Subject,
    names: list[str],
    batches: list[int],
    threads: list[int],
    seconds: float,
    output: Path | None,
    plot: Path | None,
    console: Console,
) -> None:
    """What `optg bench` does."""
    for path in (output, plot and check_plot(plot)):
        if path and not path.parent.is_dir():
            raise FileNotFoundError(f"there is no folder {path.parent} to write {path.name} into")
    report = bench(subject, names, batches, threads or sorted({1, cores()}), seconds, console)
    console.print(table(report))
    for line in (*verdicts(report), *report.notes):
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    if output:
        write_json(report, output)
    if plot:
        draw(report, plot)


if __name__ == "__main__":
    answer(sys.argv[1])
