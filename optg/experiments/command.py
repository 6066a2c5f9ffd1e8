"""`optg reproduce`: its flags, and what it does with them. Torch is only imported when it is needed."""

import shlex
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro
from rich.console import Console

from optg import trust
from optg.terminal import wide_console
from optg.training.arguments import TrustFlag

if TYPE_CHECKING:
    from optg.experiments.declaration import Experiment, Selection
    from optg.experiments.launcher import Launcher
    from optg.experiments.planned_run import PlannedRun
    from optg.experiments.records import Summaries

Flag = tyro.conf.FlagCreatePairsOff
Group = tyro.conf.OmitArgPrefixes
Instead = tyro.conf.create_mutex_group(required=False, title="instead of running")


@dataclass
class Which:
    """Run a part of the experiment."""

    on: tuple[str, ...] = ()  # datasets: cifar10, cifar100, imagenet, …; by default a cheap one, for Table 1 both CIFARs
    only: tuple[str, ...] = ()  # rows of the table, by label or method
    columns: tuple[str, ...] = ()  # columns of the table, by label
    sparsity: tuple[float, ...] = ()  # other sparsities than the declared ones, such as 0.98
    seeds: tuple[int, ...] = ()  # other seeds than the declared ones, for every row


@dataclass
class Changes:
    """Change every run; by default the recipe's values."""

    epochs: int | None = None  # epochs to train
    data: str | None = None  # dataset to train on
    folder: str | None = None  # folder that has the data
    model: str | None = None  # model to train
    set: tuple[str, ...] = ()  # any other setting of the recipe, such as batch_size=256 weight_decay=5e-4


@dataclass
class Execution:
    """How to run, and where to keep the results."""

    jobs: int | None = None  # runs at a time, by default 1 (ray: no limit); 0: train in this process, for very short runs
    launcher: Literal["local", "ray"] = "local"  # where to run: processes on this machine, or tasks of a Ray cluster
    gpus: float | None = None  # with --launcher ray: GPUs of each run, such as 0.25; by default 1 if the cluster has any
    cpus: float = 1.0  # with --launcher ray: CPU cores of each run
    trust: TrustFlag = False
    mps: Annotated[bool, Flag] = False  # let the runs on a GPU share it through NVIDIA's MPS
    device: str = "auto"  # cuda, cpu; auto: a GPU if there is one; several GPUs are used in turn
    minutes: float | None = None  # time limit, after which the runs save and stop, as after Ctrl-C
    output: Path = Path("runs/reproduce")  # folder of all runs
    record: Path | None = None  # add finished runs to this .jsonl file; runs in it or in a file beside it are not repeated
    plot: Path | None = None  # plot accuracy to this file: .svg, .png or .pdf
    against: Literal["sparsity", "flops", "training-flops"] = "sparsity"  # the horizontal axis of --plot


@dataclass
class Reproduce:
    names: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="NAME …")] = ()  # experiments, see --list
    list: Annotated[bool, Flag, Instead] = False  # print all experiments, their number of runs and their cost
    table: Annotated[bool, Flag, Instead] = False  # print the tables of the runs that have already finished
    plan: Annotated[bool, Flag, Instead] = False  # print the commands of the runs
    results: Annotated[Path | None, Instead] = None  # write RESULTS.md, all results, from results/*.jsonl beside it
    which: Annotated[Which, Group] = field(default_factory=Which)
    change: Annotated[Changes, Group] = field(default_factory=Changes)
    execution: Annotated[Execution, Group] = field(default_factory=Execution)


def reproduce(options: Reproduce) -> int:
    """Run the remaining runs of some experiments and print their tables. Return the exit status."""
    console, execution = wide_console(), options.execution
    if options.results or options.list or not options.names:
        refuse_other_flags(options)
        show_all_experiments(options, console)
        return 0
    from optg.experiments.declaration import load_experiment
    from optg.experiments.records import finished_runs, records_beside

    if execution.trust:
        trust.allow_everything()
    selection = build_selection(options)
    experiments = [load_experiment(name, selection) for name in dict.fromkeys(options.names)]
    if execution.plot and not (len(experiments) == 1 and experiments[0].by_sparsity):
        raise ValueError("--plot needs one experiment whose columns are sparsities, such as extreme or accuracy-sparsity")
    if execution.against != "sparsity" and not execution.plot:
        raise ValueError(f"--against {execution.against} has no effect without --plot FILE; add it or remove --against")
    runs = list({run.key: run for experiment in experiments for run in experiment.runs}.values())
    if options.plan:
        for run in runs:
            print(shlex.join(["optg", *run.arguments, "--output", str(execution.output / run.name)]))
        return 0
    status = run_all(execution, runs, console) if runs and not options.table else 0
    summaries = finished_runs(execution.output, records_beside(execution.record)) if runs else {}
    for experiment in experiments:
        show_experiment(experiment, summaries, options, console)
    return status


def refuse_other_flags(options: Reproduce) -> None:
    """Raise if a name or flag would have no effect: --list and --results cover all experiments, other flags need names."""
    action = "results" if options.results else "list"
    given, default = all_flags(options), all_flags(Reproduce())
    for key in default:
        if given[key] != default[key] and key not in (action, "output"):
            if not options.results and not options.list:
                raise ValueError(f"--{key} needs the name of an experiment; see optg reproduce --list")
            flag = options.names[0] if key == "names" else f"--{key}"
            raise ValueError(f"{flag} has no effect on --{action}, which covers all experiments; remove one of them")


def all_flags(options: Reproduce) -> dict[str, Any]:
    """Return the values of all flags by name."""
    groups = (options.which, options.change, options.execution)
    own = {key: value for key, value in vars(options).items() if value not in groups}
    return own | {key: value for group in groups for key, value in vars(group).items()}


def show_all_experiments(options: Reproduce, console: Console) -> None:
    """Write the page of results, or print the list of experiments."""
    if options.results:
        from optg.experiments.results_page import write_results_page

        write_results_page(options.results)
        return
    from optg.experiments.records import finished_runs, records_in
    from optg.experiments.tables import overview_table

    console.print(overview_table(finished_runs(options.execution.output, records_in(Path("results")))))


def show_experiment(experiment: "Experiment", summaries: "Summaries", options: Reproduce, console: Console) -> None:
    """Print the table of the finished runs, and draw the experiment's figure if it has one."""
    from optg.experiments.tables import experiment_table

    output, plot = options.execution.output, options.execution.plot
    if experiment.curves:
        from optg.experiments.drawing import draw_schedules

        console.print(f"{experiment.title}: {draw_schedules(experiment.curves, output)}", soft_wrap=True)
        return
    console.print(experiment_table(experiment, summaries))
    for note in experiment.notes:
        console.print(f"- {note}", highlight=False, markup=False)
    if plot or (experiment.plotted and not options.table):
        from optg.experiments.drawing import draw_accuracy

        against = options.execution.against
        drawn = draw_accuracy(experiment, summaries, plot or output / f"{experiment.name}.png", against)
        console.print(drawn or f"nothing to plot: no sparse run with its {against} has finished", soft_wrap=True)


def run_all(execution: Execution, runs: "list[PlannedRun]", console: Console) -> int:
    """Run the runs that have not finished. Return the exit status."""
    from optg.experiments.mps import multi_process_service
    from optg.experiments.runner import Runner

    if execution.jobs is not None and execution.jobs < 0:
        raise ValueError(f"--jobs is {execution.jobs}; expected at least 1, or 0 to train in this process")
    if execution.minutes is not None and not 0 < execution.minutes < 1e6:
        raise ValueError(f"--minutes is {execution.minutes:g}; expected more than 0 and less than a million")
    launcher, jobs = choose_launcher(execution, len(runs))
    with multi_process_service(execution.mps):
        runner = Runner(
            execution.output,
            jobs=jobs,
            device=execution.device,
            launcher=launcher,
            record_file=execution.record,
            minutes=execution.minutes,
            console=console,
        )
        return runner.run(runs)


def choose_launcher(execution: Execution, runs: int) -> "tuple[Launcher | None, int]":
    """Return the launcher, None for the local one, and the number of runs at a time."""
    if execution.launcher == "local":
        for flag, is_given in (("gpus", execution.gpus is not None), ("cpus", execution.cpus != Execution.cpus)):
            if is_given:
                raise ValueError(f"--{flag} has no effect on this machine; remove it, or add --launcher ray")
        return None, 1 if execution.jobs is None else execution.jobs
    if execution.mps or execution.jobs == 0:
        raise ValueError(f"{'--mps' if execution.mps else '--jobs 0'} is for runs on this machine; remove it or --launcher ray")
    from optg.experiments.ray_launcher import RayLauncher

    launcher = RayLauncher(gpus=execution.gpus, cpus=execution.cpus, device=execution.device)
    return launcher, execution.jobs or max(1, runs)


def build_selection(options: Reproduce) -> "Selection":
    """Return the selected runs and changed settings, without repeated values."""
    from optg.experiments.declaration import Selection

    which, change = options.which, options.change
    for sparsity in which.sparsity:
        if not 1e-6 <= sparsity < 1:
            raise ValueError(f"--sparsity is {sparsity}; expected the share of weights to remove, between 0 and 1")
    named = {"epochs": change.epochs, "data": change.data, "folder": change.folder, "model": change.model}
    settings = dict(parse_setting(text) for text in change.set)
    settings |= {key: value for key, value in named.items() if value is not None}
    trust.allow(settings.get("model"))
    trust.allow(settings.get("data"))
    return Selection(
        on=tuple(dict.fromkeys(which.on)),
        only=which.only,
        columns=which.columns,
        sparsity=tuple(dict.fromkeys(which.sparsity)),
        seeds=tuple(dict.fromkeys(which.seeds)),
        settings=settings,
        output=options.execution.output,
    )


def parse_setting(text: str) -> tuple[str, Any]:
    """Split key=value. A value that is not TOML is a string."""
    from optg.training.recipe import parse_value

    key, equals, value = text.partition("=")
    if not equals:
        raise ValueError(f"--set {text!r}; expected a setting and its value, such as batch_size=256")
    return key, parse_value(value)
