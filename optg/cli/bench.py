"""The command `optg bench`."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import tyro

from optg import trust
from optg.training.arguments import ModelOptions, TrustFlag, parse_with_model_options


@dataclass
class BenchOptions:
    # run folder, one of its checkpoints, a packed file, or a model's name, which gets random weights and masks
    what: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN|CHECKPOINT|FILE|MODEL")]
    batches: tuple[int, ...] = (1, 32)  # batch sizes to measure
    threads: tuple[int, ...] = ()  # numbers of threads to measure; by default 1 and the number of cores
    seconds: float = 2.0  # minimum time for each engine in each setting
    # any of optg, torch, torch.compile, onnxruntime, "openvino f32", "openvino bf16", "optg int8", "onnxruntime int8",
    # "openvino int8" and, on a GPU, "gpu bf16", "gpu bf16 2:4", "gpu bf16 shrunk"; by default all that are installed
    engines: tuple[str, ...] = ()
    output: Path | None = None  # JSON file to write
    plot: Path | None = None  # figure to write: .png, .svg or .pdf
    sparsity: float | None = None  # sparsity of a model given by name, with ERK layer budgets; by default 0.9
    classes: int | None = None  # number of classes of such a model; by default 1000 for ImageNet models, else 10
    shape: tuple[int, int, int] | None = None  # channels, height and width of its images
    model_options: ModelOptions = field(default_factory=dict)
    trust: TrustFlag = False


def main(args: list[str]) -> None:
    """Compare the speed of a model in optg and in other engines: on this CPU, and on a GPU if there is one."""
    options = parse_with_model_options(BenchOptions, args, "optg bench", main.__doc__)
    if options.trust:
        trust.allow_everything()

    from optg.deploy import bench
    from optg.terminal import PlainConsole

    subject = bench.Subject(options.what, options.sparsity, options.classes, options.shape, options.model_options)
    bench.run_benchmark(
        subject, list(options.engines), list(options.batches), list(options.threads), options.seconds, options.output,
        options.plot, PlainConsole(),
    )  # fmt: skip
