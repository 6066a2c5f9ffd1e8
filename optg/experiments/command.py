"""`optg reproduce`: its options, and what it does with them. Torch is imported only when something is to be done."""

import shlex
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro
from rich.console import Console
from rich.table import Table

from optg.terminal import wide_console

if TYPE_CHECKING:
    from optg.experiments.declaration import Choice, Experiment
    from optg.experiments.record import Summaries

Flag = tyro.conf.FlagCreatePairsOff


@dataclass
class Reproduce:
    names: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="NAME …")] = ()  # several share the jobs
    list: Annotated[bool, Flag] = False  # all experiments, with the number of their runs and what they cost
    table: Annotated[bool, Flag] = False  # only print the table of what is there already
    plan: Annotated[bool, Flag] = False  # only print the commands of the runs, in their order
    results: Path | None = None  # write a page of all experiments (RESULTS.md) from the records beside it in results/*.jsonl
    on: tuple[str, ...] = ()  # cifar10, cifar100, imagenet, …: where it runs; by default a cheap one, for Tab. 1 both CIFAR
    only: tuple[str, ...] = ()  # these rows, by their label or method
    columns: tuple[str, ...] = ()  # these columns, by their label
    sparsity: tuple[float, ...] = ()  # these instead of the declared ones
    seeds: tuple[int, ...] = ()  # for every row, instead of the declared ones
    jobs: int = 1  # runs side by side; 0: one after the other inside this process, for very short ones
    mps: Annotated[bool, Flag] = False  # let the runs on one GPU share it through NVIDIA's MPS
    device: str = "auto"  # cuda, cpu; auto: a GPU if there is one; several are used in turn
    minutes: float | None = None  # after which the runs save and stop, as on Ctrl-C
    output: Path = Path("runs/reproduce")  # the folder of all runs
    record: Path | None = None  # add each finished run to this file; what it or one beside it holds is not run again
    epochs: int | None = None
    data: str | None = None
    folder: str | None = None  # that has the data
    model: str | None = None
    set: tuple[str, ...] = ()  # other settings of every run, such as batch_size=256 weight_decay=5e-4


def reproduce(options: Reproduce) -> int:
    """Run what is left to run of experiments and print their tables. Returns the exit status."""
    console = wide_console()
    refuse(options)
    if options.results:
        from optg.experiments.results import write

        write(options.results)
        return 0
    if options.list or not options.names:
        console.print(overview(options))
        return 0
    from optg.experiments import declaration, record

    experiments = [declaration.load(name, choice(options)) for name in dict.fromkeys(options.names)]
    runs = list({one.key: one for experiment in experiments for one in experiment.runs}.values())
    if options.plan:
        for one in runs:
            print(shlex.join(["optg", *one.arguments, "--output", str(options.output / one.name)]))
        return 0
    status = run(options, runs, console) if runs and not options.table else 0
    known = record.known(options.output, record.beside(options.record)) if runs else {}
    for experiment in experiments:
        show(experiment, known, options, console)
    return status


def refuse(options: Reproduce) -> None:
    """Flags that nothing would come of: a list and a page are of all experiments."""
    whole = "results" if options.results else "list" if options.list or not options.names else None
    usual = Reproduce()
    odd = [key for key in vars(usual) if key not in (whole, "output") and getattr(options, key) != getattr(usual, key)]
    if whole and odd:
        flag = options.names[0] if options.names else f"--{odd[0]}"
        raise ValueError(f"{flag} says nothing of all experiments; expected names without --{whole}, or --{whole} alone")


def show(experiment: "Experiment", known: "Summaries", options: Reproduce, console: Console) -> None:
    """Its table of what is known, and its picture where it has one."""
    from optg.experiments.table import table

    if experiment.curves:
        from optg.experiments.drawing import draw_schedules

        console.print(f"{experiment.title}: {draw_schedules(experiment.curves, options.output)}", soft_wrap=True)
        return
    console.print(table(experiment, known))
    for note in experiment.notes:
        console.print(f"- {note}", highlight=False, markup=False)
    if experiment.name == "accuracy-sparsity" and not options.table:
        from optg.experiments.drawing import draw_accuracy

        drawn = draw_accuracy(experiment, known, options.output)
        console.print(drawn or "no run has ended yet: nothing is drawn", soft_wrap=True)


def run(options: Reproduce, runs: list[Any], console: Console) -> int:
    from optg.experiments.runner import Runner, multi_process_service

    if options.jobs < 0:
        raise ValueError(f"--jobs is {options.jobs}; expected at least 1, or 0 for this process")
    if options.minutes is not None and not 0 < options.minutes < 1e6:
        raise ValueError(f"--minutes is {options.minutes:g}; expected more than 0, and less than a million")
    with multi_process_service(options.mps):
        runner = Runner(
            options.output, jobs=options.jobs, device=options.device, record_file=options.record, minutes=options.minutes,
            console=console,
        )  # fmt: skip
        return runner.run(runs)


def choice(options: Reproduce) -> "Choice":
    from optg.experiments.declaration import Choice

    settings: dict[str, Any] = {}
    for given in options.set:
        key, equals, value = given.partition("=")
        if not equals:
            raise ValueError(f"--set {given!r}; expected a setting and its value, such as batch_size=256")
        try:
            settings[key] = tomllib.loads(f"value = {value}")["value"]
        except tomllib.TOMLDecodeError:
            settings[key] = value  # a name
    named = {"epochs": options.epochs, "data": options.data, "folder": options.folder, "model": options.model}
    settings |= {key: value for key, value in named.items() if value is not None}
    for sparsity in options.sparsity:
        if not 1e-6 <= sparsity < 1:
            raise ValueError(f"--sparsity is {sparsity}; expected the share of weights to remove, between 0 and 1")
    return Choice(
        tuple(dict.fromkeys(options.on)), options.only, options.columns, sparsity=tuple(dict.fromkeys(options.sparsity)),
        seeds=tuple(dict.fromkeys(options.seeds)), settings=settings, output=options.output,
    )  # fmt: skip


def overview(options: Reproduce) -> Table:
    """All experiments: where they run, how many runs, and what these cost."""
    from optg.experiments import record
    from optg.experiments.cost import Cost

    cost = Cost(record.known(options.output, record.within(Path("results"))).values())
    made = Table(title="optg reproduce NAME", title_justify="left")
    for column in ("name", "what", "on", "runs", "epochs", "run hours"):
        made.add_column(column, justify="left" if column in ("name", "what", "on") else "right", overflow="fold")
    for name, title, place, runs in everything():
        epochs = sum(run.plan.recipe.epochs for run in runs)
        made.add_row(name, title, place, f"{len(runs)}", f"{epochs:,}", cost.text(runs))
    made.caption = (
        "Hours of training, summed over runs, as they ran for results/*.jsonl of this folder: runs that share a GPU take "
        "longer each, and less together; unknown where nothing like it was measured."
    )
    return made


def everything() -> Iterator[tuple[str, str, str, list[Any]]]:
    """Name and title, once each, and the runs at every place."""
    from optg.experiments import declaration

    for name in declaration.names():
        places = declaration.contents()[name].get("on", {})
        for i, place in enumerate(places or [""]):
            experiment = declaration.load(name, declaration.Choice(on=(place,) if place else ()))
            yield (name, experiment.title, place, experiment.runs) if i == 0 else ("", "", place, experiment.runs)
