"""The commands. Each imports what it needs when it is called, so that `optg --help` need not wait for torch.

`train` is read in two steps: --recipe and --method first, then the rest against that recipe's and that method's own settings.
"""

import dataclasses
import gc
import os
import sys
import sysconfig
import traceback
import warnings
from dataclasses import dataclass
from inspect import getdoc
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from optg.experiments.command import Reproduce
from optg.experiments.paradox.command import Paradox
from optg.training.recipe import Plan, Recipe, RecipeError, build_method, check, dump, load, names


def train(args: list[str]) -> None:
    """Train a model from a recipe, and make it sparse: optg train --recipe vgg19-cifar10 --method rigl --sparsity 0.95

    --recipe NAME (see optg recipes) and --method NAME (see optg methods) say what the options below are. A run goes on by
    itself where its folder has a checkpoint.
    """
    gc.disable()  # imports and flags make no garbage: looking for it would be a third of the time that --help takes
    try:
        plan, options = understand(args)
    except SystemExit:
        gc.freeze()  # nor is there any to look for at the end
        raise
    finally:
        gc.enable()

    from rich.console import Console

    from optg.training import board, run
    from optg.training.checkpoint import list_steps
    from optg.training.loop import Saving
    from optg.training.parallel import start

    folder = options.output or Path("runs") / run.name_of(plan)
    if not options.resume and list_steps(folder / "checkpoints"):
        raise RecipeError(f"{folder} has checkpoints; give another --output, or leave out --no-resume to go on from them")
    if options.tensorboard:
        board.refuse_missing()
    console = Console()
    saving = Saving(options.minutes, options.keep)
    with start(options.parallel, options.device) as parallel:
        summary = run.run(plan, folder, parallel, saving, console, options.tensorboard)
    if parallel.first:
        text = f"{plan.method}: accuracy {summary['accuracy']:.2%} at sparsity {summary['sparsity']:.2%}, "
        console.print(
            f"{text}{summary['flops'] / 1e6:,.1f} of {summary['dense_flops'] / 1e6:,.1f} MFLOPs. {folder}", soft_wrap=True
        )
    if parallel.world > 1:  # all is written: threads of torch's connections have been seen to abort a process as it ends
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def understand(args: list[str]) -> tuple[Plan, Any]:
    """The plan and the other options that the arguments of `train` ask for."""
    from optg.methods import defaults

    given, rest = take(args, "--recipe", "--method")
    plan = load(given["--recipe"] or "digits")
    plan.method = given["--method"] or plan.method
    chosen = build_method(plan, given["--recipe"] or "digits")
    if chosen.when == "never":
        plan.recipe.sparsity = 0.0  # unless the command line asks for another, which is refused
    kind = type(chosen)

    @dataclass
    class Train:
        recipe: Annotated[Recipe, tyro.conf.arg(name="")]
        method: Annotated[kind, tyro.conf.arg(help=f"of {plan.method}")]  # type: ignore[valid-type]
        output: Path | None = None  # the folder of the run; by default runs/ and a name made from the settings
        resume: bool = True  # go on from the folder's newest checkpoint; else such a folder is refused
        parallel: Literal["none", "ddp", "fsdp"] = "none"  # over the processes that torchrun started
        device: str = "auto"  # cuda, cpu; auto: a GPU if there is one
        minutes: float = 10.0  # between two checkpoints; after an epoch one is made if a tenth of that has passed
        keep: int = 2  # checkpoints
        tensorboard: bool = False  # write the metrics for TensorBoard too: pip install 'optg[tensorboard]'

    options = tyro.cli(Train, args=rest, default=Train(plan.recipe, chosen), prog="optg train", description=getdoc(train))
    changed = {f.name: getattr(options.method, f.name) for f in dataclasses.fields(options.method)}
    usual = defaults(plan.method)
    plan.methods = {plan.method: {k: v for k, v in changed.items() if v != usual[k]}}
    plan.recipe = check(options.recipe, "command line")
    return plan, options


def evaluate(run: Annotated[Path, tyro.conf.Positional], device: str = "auto") -> None:
    """Test the model of a run, or of one of its checkpoints, again.

    Args:
        run: the folder of the run, or RUN/checkpoints/step-N.
        device: cuda, cpu; auto: a GPU if there is one.
    """
    from optg import data as datasets
    from optg.training import recipe
    from optg.training.checkpoint import is_checkpoint
    from optg.training.evaluation import evaluate as test
    from optg.training.folder import is_run
    from optg.training.parallel import start
    from optg.training.run import reopen

    home = run.resolve().parents[1] if is_checkpoint(run) else run
    if not is_run(home):
        raise RecipeError(f"{home} is not the folder of a run: it has no recipe.toml")
    settings, parallel = recipe.load(str(home / "recipe.toml")).recipe, start("none", device)
    data = datasets.load(
        settings.data, settings.folder, batch_size=settings.batch_size, device=parallel.device, seed=settings.seed
    )
    _, model = reopen(run, data.classes)
    metrics = test(model.to(parallel.device), data, settings, parallel)
    print(f"accuracy {metrics['accuracy']:.2%}  loss {metrics['test_loss']:.4f}  ({data.sizes[1]} images)")


def summary(what: Annotated[str, tyro.conf.Positional], classes: int = 10, shape: tuple[int, int, int] | None = None) -> None:
    """Shapes, density, parameters and FLOPs of every layer of a run, a checkpoint or a model.

    Args:
        what: the folder of a run, RUN/checkpoints/step-N, or a model's name.
        classes: of a model that is given by name.
        shape: of its images: channels, height, width; by default 3 32 32, or 1 8 8 for digits.
    """
    from optg.terminal import wide_console
    from optg.training.inspect import table

    wide_console().print(table(what, classes, shape))


def methods(markdown: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False) -> None:
    """List the methods: paper, when they prune, what removed weights come back to, and their options.

    Args:
        markdown: print the table as docs/methods.md has it.
    """
    from optg.methods import describe
    from optg.methods import markdown as as_markdown

    if markdown:
        print(as_markdown(), end="")
        return
    from rich.table import Table

    from optg.terminal import wide_console

    rows = describe()
    table = Table(show_lines=True)
    for column in rows[0]:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*row.values())
    wide_console().print(table)


def recipes(name: Annotated[str, tyro.conf.Positional] = "") -> None:
    """List the recipes that come with the package, or print one.

    Args:
        name: of the recipe to print, every setting spelled out.
    """
    if name:
        print(dump(load(name)), end="")
        return
    for known in names():
        plan = load(known)
        r = plan.recipe
        print(f"{known:32} {r.model} on {r.data}, {r.epochs} epochs, batch {r.batch_size}, lr {r.lr}, decay {r.weight_decay}")


def reproduce(options: Annotated[Reproduce, tyro.conf.arg(name="")]) -> None:
    """Run some of the paper's tables and figures, and print our figures beside its: optg reproduce cifar --jobs 6

    Runs that have ended are not run again; the same command goes on where it was.
    """
    from optg.experiments import command

    sys.exit(command.reproduce(options))


def paradox(options: Annotated[Paradox, tyro.conf.arg(name="")]) -> None:
    """Measure the independence paradox: what criteria say removing weights does to the loss, and what it does.

    optg paradox RUN, or optg paradox vgg19 --data cifar10
    """
    from optg.experiments.paradox import command

    command.paradox(options)


def report(
    runs: Annotated[list[Path], tyro.conf.Positional, tyro.conf.arg(metavar="RUN ...", help_behavior_hint="")],
    output: Path = Path("report"),
    title: str = "Sparse training runs",
) -> None:
    """Show runs on one HTML page: tables, curves, schedules, layers, the paper's points, commands; and the figures as files.

    Args:
        runs: folders of runs, a folder of such folders, or .jsonl files of their summaries.
        output: the folder that index.html and figures/ are written to.
        title: of the page.
    """
    from optg.report import write

    print(write(runs, output, title))


def export(
    what: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN|CHECKPOINT|FILE")],
    to: Literal["packed", "safetensors", "onnx"] = "packed",
    output: Path | None = None,
    values: Literal["float32", "bfloat16"] = "float32",
) -> None:
    """Write a trained model as one small file: optg export runs/digits-optg-0.95-seed0

    Args:
        what: the folder of a run, or of one of its checkpoints (RUN/checkpoints/step-000000550), or a packed file.
        to: packed: graph, masks and values, for optg.load, run and bench; safetensors: dense tensors; onnx: for other engines.
        output: the file; by default in the run's folder, or beside the packed file.
        values: of the weights in a packed file; bfloat16 rounds them.
    """
    from optg.deploy.export import export as write

    print(write(what, to, output, values))


def infer(
    what: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="FILE|RUN|CHECKPOINT")],
    images: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="IMAGE")] = (),
    data: Literal["test"] | None = None,
    folder: str | None = None,
    threads: int | None = None,
) -> None:
    """Run a trained model on this CPU, skipping its zeros: optg run model.optg photo.jpg, or optg run RUN --data test

    Args:
        what: a packed file, or the folder of a run or of one of its checkpoints.
        images: files; the five likeliest classes of each are printed.
        data: the test images of the model's data: prints accuracy and images a second.
        folder: that has the data; by default the recipe's, else ./data.
        threads: by default as many as there are cores.
    """
    from rich.console import Console

    from optg.deploy.predict import predict

    predict(what, list(images), data == "test", folder, threads, Console())


def bench(
    what: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN|CHECKPOINT|FILE|MODEL")],
    batches: tuple[int, ...] = (1, 32),
    threads: tuple[int, ...] = (),
    seconds: float = 2.0,
    engines: tuple[str, ...] = (),
    output: Path | None = None,
    plot: Path | None = None,
    sparsity: float | None = None,
    classes: int | None = None,
    shape: tuple[int, int, int] | None = None,
) -> None:
    """Measure a model on this CPU: optg against torch, torch.compile and, where installed, onnxruntime and OpenVINO.

    Args:
        what: a run, one of its checkpoints, a packed file, or a model's name, which gets random weights and masks.
        batches: sizes to measure.
        threads: numbers of threads to measure; by default 1 and as many as there are cores.
        seconds: for each engine in each setting, at least.
        engines: to measure, of: optg, torch, torch.compile, onnxruntime, "openvino f32", "openvino bf16"; by default all.
        output: a JSON file to write.
        plot: a figure to write: .png, .svg or .pdf.
        sparsity: of a model that is given by name, shared among its layers as ERK says; by default 0.9.
        classes: of such a model; by default 1000 for ImageNet's, else 10.
        shape: of its images: channels, height, width.
    """
    from rich.console import Console

    from optg.deploy import bench as benches

    subject = benches.Subject(what, sparsity, classes, shape)
    benches.run_benchmark(subject, list(engines), list(batches), list(threads), seconds, output, plot, Console())


COMMANDS: dict[str, Any] = {
    "evaluate": evaluate,
    "summary": summary,
    "methods": methods,
    "recipes": recipes,
    "reproduce": reproduce,
    "paradox": paradox,
    "report": report,
    "export": export,
    "run": infer,
    "bench": bench,
}


def take(args: list[str], *flags: str) -> tuple[dict[str, str | None], list[str]]:
    """Values of some flags, and the other arguments."""
    found: dict[str, str | None] = dict.fromkeys(flags)
    rest, waiting = [], iter(args)
    for arg in waiting:
        flag, equals, value = arg.partition("=")
        if flag in flags:
            found[flag] = value if equals else next(waiting, "")
            if not found[flag] or found[flag].startswith("--"):  # type: ignore[union-attr]
                raise RecipeError(f"{flag} needs a value")
        else:
            rest.append(arg)
    return found, rest


def main() -> None:
    args = sys.argv[1:]
    warnings.formatwarning = lambda message, category, *_: f"{category.__name__}: {message}\n"  # a log needs no line of code
    sys.path.append(os.getcwd())  # where a model or dataset of one's own may be; last, so that no folder hides a package
    try:
        if args[:1] == ["train"]:
            train(args[1:])
        else:
            train_for_help: Any = lambda: None  # noqa: E731
            train_for_help.__doc__ = train.__doc__
            commands = {"train": train_for_help, **COMMANDS}
            tyro.extras.subcommand_cli_from_dict(commands, prog="optg", description="Sparse networks, while they train.")
    except BrokenPipeError:  # optg … | head: who reads has had enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
    except (Exception, KeyboardInterrupt) as error:
        if interrupted(error):
            print("Interrupted.", file=sys.stderr)
            sys.exit(130)
        if not expected(error):
            raise
        print(f"optg: {error}", file=sys.stderr)
        sys.exit(2)


def interrupted(error: BaseException | None) -> bool:
    """Was it Ctrl-C? Inside an import Python makes another error of it."""
    return error is not None and (isinstance(error, KeyboardInterrupt) or interrupted(error.__cause__))


def expected(error: BaseException) -> bool:
    """Is this about what a user gave, and says all there is to say? Then it needs no traceback."""
    if type(error).__name__ in ("InUse", "Diverged", "Disagreement"):
        return True
    frames = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    known = (str(Path(__file__).parent), *map(sysconfig.get_path, ("stdlib", "platstdlib", "purelib", "platlib")), "<")
    strange = [name for name in frames if not name.startswith(known)]  # a model or dataset of the user's own
    return isinstance(error, (ValueError, OSError)) and not strange
