"""`optg paradox`: its flags, the model and data it measures, and what it prints."""

import dataclasses
import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro
from rich.console import Console

from optg import trust
from optg.terminal import PlainConsole
from optg.training.arguments import ModelOptions, TrustFlag
from optg.training.recipe import refuse_model_options

if TYPE_CHECKING:
    from torch import Tensor, nn

    from optg.data import Data
    from optg.experiments.paradox.criteria import Criterion
    from optg.experiments.paradox.measure import Row
    from optg.training.saved import SavedRun

CRITERIA = ("snip", "taylor", "magnitude", "loss", "optg", "random")
SCORE_CUTS = 8  # how often the mask is cut while OptG's scores are learned


@dataclass
class Paradox:
    # run folder, one of its checkpoints, or a model's name
    what: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN|CHECKPOINT|MODEL")]
    data: str | None = None  # digits, cifar10, …, package.module:function; by default the run's data
    folder: str | None = None  # folder that has the data
    criteria: tuple[str, ...] = CRITERIA  # criteria that choose the weights to remove
    counts: tuple[int, ...] = ()  # numbers of weights to remove at once; by default 1, 10, 100, … and up to 99 %
    batches: int = 4  # batches to compute losses and gradients on
    batch_size: int = 128  # images per batch
    steps: int = 50  # training steps after the removal; 0: no training
    lr: float = 0.01  # learning rate of these steps
    accumulate: int = 64  # steps in which OptG's scores are learned, if no checkpoint has them
    samples: int = 8  # number of removed weights that are also measured one at a time
    seed: int = 0  # seed of the data order, the random criterion and the samples
    device: str = "auto"  # cuda, cpu; auto: a GPU if there is one
    trust: TrustFlag = False
    output: Path | None = None  # folder for paradox.jsonl and paradox.png; by default paradox/ and the model's name
    model_options: ModelOptions = dataclasses.field(default_factory=dict)


def paradox(options: Paradox) -> None:
    """Measure the rows that are missing from paradox.jsonl, print the table and draw the picture."""
    from optg.experiments.paradox.measure import MeasuredModel, measure
    from optg.experiments.paradox.picture import draw_paradox
    from optg.experiments.paradox.rows import RowFile
    from optg.experiments.paradox.table import paradox_table
    from optg.training.parallel import start

    check_options(options)
    folder = options.output or Path("paradox") / re.sub(r"[^\w.=-]+", "_", options.what).strip("_")
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"--output {folder} is a file; expected a folder")
    file = RowFile(folder / "paradox.jsonl", options_of_rows(options))
    console = PlainConsole()
    with start("none", options.device) as parallel:
        data, model, scores = load_subject(options, parallel.device)
        batches = first_batches(data, options.batches)
        refuse_other_data(model, batches[0], options)
        subject = MeasuredModel(model, cross_entropy_loss, batches)
        counts = checked_counts(options, subject.size, subject.original_loss)

        def training_batches() -> Iterator[Any]:
            """Yield batches of epoch 1 and later; the measured batches are of epoch 0."""
            epoch = 1
            while True:
                yield from data.train(epoch)
                epoch += 1

        source = "its checkpoint's scores" if scores else f"scores of {options.accumulate} steps on frozen weights"
        console.print(
            f"{options.what}: {subject.size:,} weights, loss {subject.original_loss:.4f} on {options.batches} "
            f"batch{'es' if options.batches > 1 else ''} of {options.batch_size}"
            + (f"; optg uses {source}" if "optg" in options.criteria else ""),
            highlight=False, soft_wrap=True,
        )  # fmt: skip
        criteria = build_criteria(options, scores, training_batches)
        found = {(row.criterion, row.removed): row for row in file.rows(subject.original_loss)}
        missing = [
            (name, criterion, count) for name, criterion in criteria.items() for count in counts if (name, count) not in found
        ]
        measured = measure(
            subject,
            missing,
            training_batches,
            steps=options.steps,
            lr=options.lr,
            samples=options.samples,
            seed=options.seed,
        )
        folder.mkdir(parents=True, exist_ok=True)
        for row in with_progress_bar(console, measured, len(missing)):
            found[row.criterion, row.removed] = row
            file.append(row)
    rows = [found[name, count] for name in criteria for count in counts]
    console.print(paradox_table(rows, options.steps, options.samples))
    draw_paradox(rows, Path(options.what).name, options.steps, folder / "paradox.png")
    console.print(f"{file.path}, {folder / 'paradox.png'}", highlight=False, soft_wrap=True)


def check_options(options: Paradox) -> None:
    from optg.naming import nearest

    if not options.criteria:
        raise ValueError(f"--criteria is empty; expected some of {', '.join(CRITERIA)}")
    for name in options.criteria:
        if name not in CRITERIA:
            raise ValueError(f"unknown criterion {name!r}; {nearest(name, CRITERIA)}")
    minima = {"batches": 1, "batch_size": 1, "steps": 0, "accumulate": 1, "samples": 1}
    for option, least in minima.items():
        if getattr(options, option) < least:
            raise ValueError(f"--{option.replace('_', '-')} is {getattr(options, option)}; expected at least {least}")
    if not 0 < options.lr < math.inf:
        raise ValueError(f"--lr is {options.lr:g}; expected a number above 0")


def checked_counts(options: Paradox, size: int, loss: float) -> Sequence[int]:
    """Return the numbers of weights to remove. Raise if the model cannot be measured."""
    if not math.isfinite(loss):
        raise ValueError(f"the loss of {options.what} is {loss} on this data; expected a finite number")
    if size < 2:
        raise ValueError(f"{options.what} has {size} nonzero weights; expected at least 2")
    for count in options.counts:
        if not 1 <= count < size:
            raise ValueError(f"--counts has {count}; expected 1 to {size - 1}, because the model has {size} nonzero weights")
    return options.counts or default_counts(size)


def default_counts(size: int) -> list[int]:
    """Return 1, 10, 100, … up to half of the weights, then 50, 90, 95 and 99 % of them."""
    powers_of_ten = [10**i for i in range(12) if 10**i < size / 2]
    shares = [min(round(size * share), size - 1) for share in (0.5, 0.9, 0.95, 0.99)]
    return list(dict.fromkeys([*powers_of_ten, *shares]))


def refuse_other_data(model: "nn.Module", batch: "tuple[Tensor, Tensor]", options: Paradox) -> None:
    """Raise if the model does not accept the data."""
    import torch

    from optg.core.preserve import preserve_model

    try:
        with preserve_model(model), torch.no_grad():
            cross_entropy_loss(model.eval(), batch)
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, IndexError, TypeError) as error:
        shape, reason = tuple(batch[0].shape[1:]), str(error).splitlines()[0]
        raise ValueError(f"{options.what} does not accept this data, whose inputs have shape {shape}: {reason}") from None


def cross_entropy_loss(model: "nn.Module", batch: "tuple[Tensor, Tensor]") -> "Tensor":
    from torch.nn.functional import cross_entropy

    return cross_entropy(model(batch[0]), batch[1])


def load_subject(options: Paradox, device: Any) -> "tuple[Data, nn.Module, list[Tensor] | None]":
    """Return the data, the model and, if a checkpoint of an OptG run holds them, its scores."""
    import torch

    from optg import data as datasets
    from optg import models
    from optg.training.saved import SavedRun

    run = SavedRun.open(options.what) if Path(options.what).is_dir() else None
    if run:
        refuse_model_options(options.what, options.model_options)
    name, folder = options.data, options.folder
    trust.allow(name)
    if options.trust:
        trust.allow_everything()
    if run:
        name, folder = name or run.plan.recipe.data, folder or run.plan.recipe.folder
    elif name is None:
        raise ValueError(f"{options.what} is not a run folder; for a model's name say the data too, such as --data cifar10")
    torch.manual_seed(options.seed)
    data = datasets.load(name, folder, batch_size=options.batch_size, device=device, seed=options.seed, augment=False)
    if run is None:
        trust.allow(options.what)
        return data, models.build(options.what, data.classes, options.model_options).to(device), None
    if (run.classes, run.shape) != (data.classes, tuple(data.shape)):
        raise ValueError(
            f"{name} has {data.classes} classes of {tuple(data.shape)}; expected what the run was trained on: "
            f"{run.classes} classes of {run.shape}"
        )
    model = run.model()
    scores = saved_scores(run, model) if run.plan.method == "optg" and "optg" in options.criteria else None
    return data, model.to(device), scores


def saved_scores(run: "SavedRun", model: "nn.Module") -> "list[Tensor] | None":
    """Return OptG's scores from the opened checkpoint, or from the run's newest one."""
    from optg.core.prunable import find_prunable

    checkpoint = run.newest_checkpoint()
    if checkpoint is None:
        return None
    tensors, _ = checkpoint.contents
    names = [f"sparsifier.scores.{name}" for name in find_prunable(model, None, ())]
    return [tensors[name] for name in names] if all(name in tensors for name in names) else None


def first_batches(data: "Data", count: int) -> list[Any]:
    """Return the first batches of epoch 0."""
    batches = []
    for batch in data.train(0):
        batches.append(batch)
        if len(batches) == count:
            return batches
    raise ValueError(f"--batches is {count}; expected at most {len(batches)}, with {data.request.batch_size} images each")


def build_criteria(
    options: Paradox, scores: "list[Tensor] | None", training_batches: Callable[[], Iterator[Any]]
) -> "dict[str, Criterion]":
    from optg.experiments.paradox import criteria

    known: dict[str, Criterion] = {
        "snip": criteria.snip,
        "taylor": criteria.taylor,
        "magnitude": criteria.magnitude,
        "loss": criteria.loss_change,
        "optg": criteria.saved_scores(scores)
        if scores
        else criteria.accumulated_scores(training_batches, options.accumulate, SCORE_CUTS),
        "random": criteria.random(options.seed),
    }
    return {name: known[name] for name in options.criteria}


def options_of_rows(options: Paradox) -> dict[str, Any]:
    """Return the options that change the measured numbers."""
    inert = ["criteria", "counts", "device", "output", "trust"] + ([] if options.model_options else ["model_options"])
    return {k: v for k, v in dataclasses.asdict(options).items() if k not in inert}


def with_progress_bar(console: Console, rows: "Iterator[Row]", total: int) -> "Iterator[Row]":
    from rich.progress import track

    yield from track(rows, "removing", total, console=console, transient=True, disable=not console.is_terminal)
