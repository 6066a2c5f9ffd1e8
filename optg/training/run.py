"""Carry out a run, from its plan to its folder: what `optg train` does."""

import dataclasses
import json
import os
import platform
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

import optg
from optg import models
from optg.core.accounting import count
from optg.core.channels import shrink
from optg.core.prunable import unwrap
from optg.machine import cpu_name, revision
from optg.training import checkpoint
from optg.training.cost import training_flops
from optg.training.evaluation import evaluate
from optg.training.folder import RunFolder
from optg.training.loggers import RunLog, make_loggers
from optg.training.loop import train
from optg.training.manifest import MODEL, RANGES, SUMMARY, Manifest
from optg.training.parallel import Parallel, start
from optg.training.prepare import begin, finished_summary
from optg.training.quantization import Int8, describe
from optg.training.recipe import Plan, method_options
from optg.training.run_name import folder_name
from optg.training.saving import CheckpointPolicy
from optg.training.setup import Setup, set_up
from optg.training.state import full_tensor

if TYPE_CHECKING:
    from optg.training.arguments import TrainOptions
    from optg.training.progress import TrainingProgress


def run_training(plan: Plan, options: "TrainOptions", int8: Int8 | None = None) -> None:
    """Train, or continue training; leave recipe, metrics, summary and model in the run folder.

    Args:
        int8: the module `optg.deploy.qat`, for runs with `--quantize int8`.
    """
    from optg.terminal import PlainConsole
    from optg.training.progress import TrainingProgress

    path = options.output or Path("runs") / folder_name(plan)
    folder, console = RunFolder(path), PlainConsole()
    policy = CheckpointPolicy(options.minutes, options.keep)
    loggers = make_loggers([*options.log, *(["tensorboard"] if options.tensorboard else [])], path)
    with start(options.parallel, options.device) as parallel:
        # A process that torchrun restarted continues what it has begun.
        fresh = options.fresh and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
        summary = finished_summary(plan, folder) if parallel.is_first and not fresh else None
        if summary:
            console.print(f"{path} has finished before; --fresh trains it again", markup=False, soft_wrap=True)
        if not parallel.any(summary is not None):
            log = RunLog(loggers if parallel.is_first else ())
            progress = TrainingProgress(path.name, console, silent=not parallel.is_first, log=log)
            summary = train_in(folder, plan, parallel, progress, policy, fresh, int8)
    if summary:
        quantized = f", {summary['int8_accuracy']:.2%} in int8," if "int8_accuracy" in summary else ""
        console.print(
            f"{plan.method}: accuracy {summary['accuracy']:.2%}{quantized} at sparsity {summary['sparsity']:.2%}, "
            f"{summary['flops'] / 1e6:,.1f} of {summary['dense_flops'] / 1e6:,.1f} MFLOPs. {path}",
            markup=False,
            soft_wrap=True,
        )


def train_in(
    folder: RunFolder,
    plan: Plan,
    parallel: Parallel,
    progress: "TrainingProgress",
    policy: CheckpointPolicy,
    fresh: bool,
    int8: Int8 | None,
) -> dict[str, Any] | None:
    """Train in a run folder. The first process writes its files and returns the summary.

    Another process may have trained here before this one got the lock, so what the folder holds is looked at again.
    The model lives only in this function: freeing a DDP model after its process group was destroyed can deadlock.
    """
    setup = set_up(plan, parallel, int8)
    if not parallel.is_first:
        with progress:
            if not parallel.any(False):
                train(setup, folder, parallel, progress, policy)
                gather_model(setup)
            return None

    def start_writing() -> None:
        begin(plan, folder, progress.say)
        progress.log.start(folder.path.name, all_settings(plan, setup))

    with folder.locked(), progress:
        if fresh and (aside := folder.move_aside()):
            progress.say(f"The earlier training was moved to {aside}. To continue this one later, leave out --fresh.")
        folder.delete_leftovers()
        checkpoint.delete_leftovers(folder.checkpoints)
        summary = finished_summary(plan, folder)
        if parallel.any(summary is not None):
            return summary
        if setup.quantization:
            progress.say(describe(setup.quantization, setup.sparsifier.clock, method_options(plan), setup.method))
        expected = setup.method.rate_schedule
        if expected not in (None, plan.recipe.schedule):
            progress.say(f"{plan.method} is meant for --schedule {expected}; this run uses --schedule {plan.recipe.schedule}")
        metrics = train(setup, folder, parallel, progress, policy, start_writing)
        tensors = gather_model(setup)
        summary = summarize(plan, setup, tensors, metrics, folder.metrics.rows) | {"processes": parallel.world}
        ranges = setup.quantization.ranges() if setup.quantization else None
        finish(folder, tensors, ranges, summary)
        return summary


def finish(folder: RunFolder, tensors: dict[str, Tensor], ranges: dict[str, Tensor] | None, summary: dict[str, Any]) -> None:
    """Write the model, its int8 ranges and the summary, then list them in the manifest: now the run has finished."""
    manifest = Manifest.read(folder.path) or Manifest()
    manifest.files[MODEL] = folder.write_tensors(MODEL, tensors)
    if ranges is not None:
        manifest.files[RANGES] = folder.write_tensors(RANGES, ranges)
    manifest.files[SUMMARY] = folder.write(SUMMARY, json.dumps(summary, indent=2) + "\n")
    manifest.metrics = folder.metrics.head
    manifest.write(folder.path)


def gather_model(setup: Setup) -> dict[str, Tensor]:
    """Return the model's tensors, whole and on the CPU. Every process must call this, because shards are joined."""
    return {name: full_tensor(t).detach().cpu().contiguous() for name, t in unwrap(setup.model).state_dict().items()}


def summarize(
    plan: Plan, setup: Setup, tensors: dict[str, Tensor], metrics: dict[str, Any], rows: list[dict[str, Any]]
) -> dict[str, Any]:
    """Return everything that tables of results need to know about a run."""
    model = models.build(plan.recipe.model, setup.data.classes, plan.recipe.model_options)
    model.load_state_dict(tensors)
    image = torch.zeros(1, *setup.data.shape, dtype=next(model.parameters()).dtype)
    account = count(model, image)
    method, clock = setup.method, setup.sparsifier.clock
    shrunk, int8, frozen_from = {}, {}, None
    if setup.quantization:
        frozen_from = setup.quantization.start
        quantized = setup.quantization.quantized(model, image).to(next(setup.model.parameters()).device)
        int8 = {"int8_accuracy": evaluate(quantized, setup.data, plan.recipe, Parallel())["accuracy"]}
    if setup.sparsifier.weights.assignment.followers:  # whole channels are removed
        small = count(shrink(model, image), image)
        shrunk = {"shrunk": {"parameters": small.parameters, "flops": small.dense_flops}}
    return {
        "recipe": plan.name,
        "settings": dataclasses.asdict(plan.recipe) | {"epochs": setup.recipe.epochs},
        "classes": setup.data.classes,
        "shape": list(setup.data.shape),
        "method": plan.method,
        "options": dataclasses.asdict(method),
        "accuracy": metrics["accuracy"],
        **int8,
        **({"validation": metrics["validation"]} if plan.recipe.validate else {}),
        "sparsity": setup.sparsifier.sparsity,
        "parameters": account.parameters,
        "nonzero": account.nonzero,
        "flops": account.flops,
        "dense_flops": account.dense_flops,
        **shrunk,
        "training_flops": training_flops(account, method, clock, rows, plan.recipe.batch_size, frozen_from),
        "unreadable": rows[-1].get("unreadable", 0) if rows else 0,
        "seconds": sum(row["seconds"] for row in rows if isinstance(row.get("seconds"), (int, float))),
        "hardware": hardware(),
        "versions": {"optg": optg.__version__, "torch": torch.__version__, "python": platform.python_version()},
        "revision": revision(),
        "command": shlex.join(["optg", *sys.argv[1:]]),
    }


def all_settings(plan: Plan, setup: Setup) -> dict[str, Any]:
    """Return recipe, method and every setting and option, as loggers show them."""
    options = dataclasses.asdict(setup.method)
    named = {"recipe": plan.name, "method": plan.method, **dataclasses.asdict(setup.recipe)}
    return named | {f"method.{key}": value for key, value in options.items()}


def hardware() -> str:
    """Return the GPU's name, or the processor's with the number of threads torch uses."""
    threads = torch.get_num_threads()
    cpu = f"{cpu_name()}, {threads} thread{'s' if threads > 1 else ''}"
    return torch.cuda.get_device_name() if torch.cuda.is_available() else cpu
