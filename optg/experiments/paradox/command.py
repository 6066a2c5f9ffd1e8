"""`optg paradox`: its options, what it measures them on, and what it shows."""

import dataclasses
import json
import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from torch import Tensor, nn

    from optg.data import Data
    from optg.experiments.paradox.criteria import Criterion
    from optg.experiments.paradox.measure import Row
    from optg.training.saved import SavedRun

CRITERIA = ("snip", "taylor", "magnitude", "loss", "optg", "random")
ROUNDS = 8  # cuts while OptG's scores are accumulated


@dataclass
class Paradox:
    what: Annotated[str, tyro.conf.Positional]  # the folder of a run, one of its checkpoints, or a model's name
    data: str | None = None  # where it is not the run's: digits, cifar10, …, package.module:function
    folder: str | None = None  # that has the data
    criteria: tuple[str, ...] = CRITERIA  # that choose what is removed
    counts: tuple[int, ...] = ()  # how many weights to remove at once; by default 1, 10, 100, … and up to 99 %
    batches: int = 4  # that losses and gradients are taken on
    batch_size: int = 128
    steps: int = 50  # of training after the removal; 0: leave it out
    lr: float = 0.01  # of these steps
    accumulate: int = 64  # steps in which OptG's scores are made, where no checkpoint has them
    samples: int = 8  # weights that are removed one at a time
    seed: int = 0
    device: str = "auto"  # cuda, cpu; auto: a GPU if there is one
    output: Path | None = None  # the folder for paradox.jsonl and paradox.png; by default paradox/ and the model's name


def paradox(options: Paradox) -> None:
    from optg.experiments.paradox.measure import Subject, measure
    from optg.experiments.paradox.picture import draw
    from optg.files import atomic_write
    from optg.naming import nearest
    from optg.training.parallel import start

    if not options.criteria:
        raise ValueError(f"--criteria names none; expected some of {', '.join(CRITERIA)}")
    folder = options.output or Path("paradox") / re.sub(r"[^\w.=-]+", "_", options.what).strip("_")
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"--output {folder} is a file; expected a folder")
    for name in options.criteria:
        if name not in CRITERIA:
            raise ValueError(f"unknown criterion {name!r}; {nearest(name, CRITERIA)}")
    limits = {"batches": 1, "batch_size": 1, "steps": 0, "accumulate": 1, "samples": 1}
    for option, least in limits.items():
        if getattr(options, option) < least:
            raise ValueError(f"--{option.replace('_', '-')} is {getattr(options, option)}; expected at least {least}")
    if not 0 < options.lr < math.inf:
        raise ValueError(f"--lr is {options.lr:g}; expected a number above 0")
    file = folder / "paradox.jsonl"
    lines = read(file)
    with start("none", options.device) as parallel:
        data, model, scores = load(options, parallel.device)
        batches = take(data, options.batches)
        refuse_other_data(model, batches[0], options)
        subject = Subject(model, loss, batches)
        if not math.isfinite(subject.whole):
            raise ValueError(f"the loss of {options.what} is {subject.whole} on this data; expected a number")
        if subject.size < 2:
            raise ValueError(f"{options.what} has {subject.size} weights that are not 0; expected at least 2")
        counts = options.counts or powers(subject.size)
        if bad := [count for count in counts if not 1 <= count < subject.size]:
            raise ValueError(f"--counts has {bad[0]}; expected 1 to {subject.size - 1}: the model has {subject.size} weights")

        def further() -> Iterator[Any]:
            """Batches to train on: not those that are measured on, which are of epoch 0."""
            epoch = 1
            while True:
                yield from data.train(epoch)
                epoch += 1

        console = Console()
        source = "its checkpoint's scores" if scores else f"scores of {options.accumulate} steps on frozen weights"
        console.print(
            f"{options.what}: {subject.size:,} weights, loss {subject.whole:.4f} on {options.batches} batches of "
            f"{options.batch_size}" + (f"; optg by {source}" if "optg" in options.criteria else ""),
            highlight=False, soft_wrap=True,
        )  # fmt: skip
        chosen = criteria(options, scores, further)
        found = {(row.criterion, row.removed): row for row in earlier(lines, options) if row.loss == subject.whole}
        wanted = [(name, choose, count) for name, choose in chosen.items() for count in counts if (name, count) not in found]
        measured = measure(
            subject, wanted, further, steps=options.steps, lr=options.lr, samples=options.samples, seed=options.seed
        )
        folder.mkdir(parents=True, exist_ok=True)
        for row in shown(console, measured, len(wanted)):
            found[row.criterion, row.removed] = row
            lines.append({**dataclasses.asdict(row), "options": recorded(options)})
            with atomic_write(file) as partial:
                partial.write_text("".join(json.dumps(line) + "\n" for line in lines))
    rows = [found[name, count] for name in chosen for count in counts]
    console.print(table(rows, options))
    draw(rows, Path(options.what).name, options.steps, folder / "paradox.png")
    console.print(f"{file}, {folder / 'paradox.png'}", highlight=False, soft_wrap=True)


def refuse_other_data(model: "nn.Module", batch: "tuple[Tensor, Tensor]", options: Paradox) -> None:
    import torch

    from optg.core.preserve import preserve_model

    try:
        with preserve_model(model), torch.no_grad():
            loss(model.eval(), batch)
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, IndexError, TypeError) as error:
        shape, said = tuple(batch[0].shape[1:]), str(error).splitlines()[0]
        raise ValueError(f"{options.what} cannot take what the data has, {shape}: {said}") from None


def loss(model: "nn.Module", batch: "tuple[Tensor, Tensor]") -> "Tensor":
    from torch.nn.functional import cross_entropy

    return cross_entropy(model(batch[0]), batch[1])


def load(options: Paradox, device: Any) -> "tuple[Data, nn.Module, list[Tensor] | None]":
    """Return the data, the model and, if a checkpoint of an OptG run holds them, its scores."""
    import torch

    from optg import data as datasets
    from optg import models
    from optg.training.saved import SavedRun

    run = SavedRun.open(options.what) if Path(options.what).is_dir() else None
    name, folder = options.data, options.folder
    if run:
        name, folder = name or run.plan.recipe.data, folder or run.plan.recipe.folder
    elif name is None:
        raise ValueError(f"{options.what} is not a run folder; for a model's name say the data too, such as --data cifar10")
    torch.manual_seed(options.seed)
    data = datasets.load(name, folder, batch_size=options.batch_size, device=device, seed=options.seed, augment=False)
    if run is None:
        return data, models.build(options.what, data.classes).to(device), None
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


def take(data: "Data", count: int) -> list[Any]:
    batches = []
    for batch in data.train(0):
        batches.append(batch)
        if len(batches) == count:
            return batches
    raise ValueError(f"--batches is {count}; there are {len(batches)} of {data.request.batch_size} images each")


def powers(size: int) -> list[int]:
    """1, 10, 100, … below half of the weights, then half, 90, 95 and 99 % of them; of a few not all, and each once."""
    tens = [10**i for i in range(12) if 10**i < size / 2]
    shares = [min(round(size * share), size - 1) for share in (0.5, 0.9, 0.95, 0.99)]
    return list(dict.fromkeys([*tens, *shares]))


def criteria(options: Paradox, scores: "list[Tensor] | None", further: Callable[[], Iterator[Any]]) -> "dict[str, Criterion]":
    from optg.experiments.paradox import criteria as known

    optg = known.saved_scores(scores) if scores else known.accumulated_scores(further, options.accumulate, ROUNDS)
    all_of_them: dict[str, Criterion] = {
        "snip": known.snip, "taylor": known.taylor, "magnitude": known.magnitude, "loss": known.loss_change, "optg": optg,
        "random": known.random(options.seed),
    }  # fmt: skip
    return {name: all_of_them[name] for name in options.criteria}


def recorded(options: Paradox) -> dict[str, Any]:
    """Options that make a row what it is."""
    return {k: v for k, v in dataclasses.asdict(options).items() if k not in ("criteria", "counts", "device", "output")}


def read(path: Path) -> list[dict[str, Any]]:
    """All that was measured before, by this command or another."""
    from optg.experiments.paradox.measure import Row

    known = {field.name for field in dataclasses.fields(Row)} | {"options"}
    lines = []
    for number, line in enumerate(path.read_text(errors="replace").splitlines() if path.exists() else [], 1):
        try:
            lines.append(json.loads(line))
            fits = lines[-1].keys() == known
        except (ValueError, AttributeError):
            fits = False
        if not fits:
            raise ValueError(f"{path}, line {number}, is no row of optg paradox; move the file away, or give another --output")
    return lines


def earlier(lines: list[dict[str, Any]], options: Paradox) -> "list[Row]":
    """Rows that a command of the same options has left."""
    from optg.experiments.paradox.measure import Row

    same = [line for line in lines if line["options"] == recorded(options)]
    return [Row(**{key: value for key, value in line.items() if key != "options"}) for line in same]


def shown(console: Console, rows: "Iterator[Row]", total: int) -> "Iterator[Row]":
    """The rows, with a bar in a terminal."""
    from rich.progress import track

    yield from track(rows, "removing", total, console=console, transient=True, disable=not console.is_terminal)


def table(rows: "Sequence[Row]", options: Paradox) -> Table:
    made = Table(title="What removing weights at once does to the loss", title_justify="left", caption_justify="left")
    made.box, made.pad_edge, made.padding = None, False, (0, 1, 0, 0)  # so that it fits 80 columns
    tuned = f"; tuned: the same after {options.steps} steps of training of the rest" if options.steps else ""
    made.caption = (
        f"predicted: −Σ g·w; true: the loss without them less the loss with them{tuned}. One weight of them, in the mean of "
        f"{options.samples} or all: alone, the others in place (Eq. 7); among, the others removed"
        f"{' and the rest trained' if options.steps else ''} (Eq. 8); gap: |Eq. 8 − Eq. 7|."
    )
    made.add_column("criterion")
    for column in ("removed", "share", "predicted", "true", "tuned", "alone", "among", "gap"):
        made.add_column(column, justify="right")
    last = None
    for row in rows:
        if last not in (None, row.criterion):
            made.add_row()
        figures = ["" if v is None else f"{v:+.1e}" for v in (row.predicted, row.true, row.tuned)]
        singles = [f"{value:.1e}" for value in (row.alone, row.among, row.gap)]
        name = row.criterion if last != row.criterion else ""
        made.add_row(name, f"{row.removed:,}", f"{row.share:.1%}", *figures, *singles)
        last = row.criterion
    return made
