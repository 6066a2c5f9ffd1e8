"""Carry out a run, from its plan to its folder: what `optg train` does."""

import dataclasses
import json
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
from optg.core.prunable import unwrap
from optg.machine import cpu_name, revision
from optg.training import recipe
from optg.training.checkpoint import list_checkpoints
from optg.training.folder import RunFolder, is_run
from optg.training.loop import train
from optg.training.parallel import Parallel, start
from optg.training.recipe import Plan
from optg.training.saved import read_json
from optg.training.saving import CheckpointPolicy
from optg.training.setup import Setup, set_up
from optg.training.state import full_tensor
from optg.training.tensorboard import require_tensorboard

if TYPE_CHECKING:
    from optg.training.arguments import TrainOptions
    from optg.training.progress import TrainingProgress


def run_training(plan: Plan, options: "TrainOptions") -> None:
    """Train, or continue training; leave recipe, metrics, summary and model in the run folder."""
    from rich.console import Console

    from optg.training.progress import TrainingProgress

    path = options.output or Path("runs") / folder_name(plan)
    folder, console = RunFolder(path), Console()
    policy = CheckpointPolicy(options.minutes, options.keep)
    if not options.resume and list_checkpoints(folder.checkpoints):
        raise recipe.RecipeError(
            f"{path} has checkpoints; give another --output, or leave out --no-resume to continue from them"
        )
    if options.tensorboard:
        require_tensorboard()
    refuse_other_plan(plan, folder)
    with start(options.parallel, options.device) as parallel:
        summary = finished_summary(folder)
        if summary is None:
            tensorboard = path if options.tensorboard and parallel.is_first else None
            progress = TrainingProgress(path.name, console, silent=not parallel.is_first, tensorboard=tensorboard)
            summary = train_in(folder, plan, parallel, progress, policy)
    if parallel.is_first:
        console.print(
            f"{plan.method}: accuracy {summary['accuracy']:.2%} at sparsity {summary['sparsity']:.2%}, "
            f"{summary['flops'] / 1e6:,.1f} of {summary['dense_flops'] / 1e6:,.1f} MFLOPs. {path}",
            soft_wrap=True,
        )


def folder_name(plan: Plan) -> str:
    """Return the default name of a run's folder."""
    return f"{plan.name.replace(':', '-')}-{plan.method}-{plan.recipe.sparsity:g}-seed{plan.recipe.seed}"


def train_in(
    folder: RunFolder, plan: Plan, parallel: Parallel, progress: "TrainingProgress", policy: CheckpointPolicy
) -> dict[str, Any]:
    """Train in a run folder. The first process writes its files and returns the summary.

    The model lives only in this function: freeing a DDP model after its process group was destroyed can deadlock.
    """
    setup = set_up(plan, parallel)
    if not parallel.is_first:
        with progress:
            train(setup, folder, parallel, progress, policy)
            gather_model(setup)
            return {}
    with folder.locked(), progress:
        folder.write("recipe.toml", recipe.dump(plan))
        metrics = train(setup, folder, parallel, progress, policy)
        tensors = gather_model(setup)
        summary = summarize(plan, setup, tensors, metrics, folder.metrics()) | {"processes": parallel.world}
        folder.write_tensors("model.safetensors", tensors)
        folder.write("summary.json", json.dumps(summary, indent=2) + "\n")
        return summary


def finished_summary(folder: RunFolder) -> dict[str, Any] | None:
    """Return the summary of a finished run, None if it has to be trained. A finished run's files are never rewritten."""
    if not is_run(folder.path) or not (folder.path / "model.safetensors").is_file():
        return None
    summary = read_json(folder.path / "summary.json")
    complete = isinstance(summary, dict) and {"accuracy", "sparsity", "flops", "dense_flops"} <= summary.keys()
    return summary if complete else None


def refuse_other_plan(plan: Plan, folder: RunFolder) -> None:
    """Raise an error if the folder holds results of another recipe. Only the data's folder may differ."""
    path = folder.path / "recipe.toml"
    has_results = list_checkpoints(folder.checkpoints) or folder.metrics() or (folder.path / "summary.json").exists()
    if not path.exists() or not has_results:
        return
    before, now = (
        {line for line in text.splitlines() if not line.startswith("folder = ")}
        for text in (path.read_text(errors="replace"), recipe.dump(plan))
    )
    if before != now:
        there, here = (", ".join(line for line in sorted(lines) if line) or "–" for lines in (before - now, now - before))
        raise recipe.RecipeError(
            f"{folder.path} holds a run with other settings (there: {there}; here: {here}); give another --output"
        )


def gather_model(setup: Setup) -> dict[str, Tensor]:
    """Return the model's tensors, whole and on the CPU. Every process must call this, because shards are joined."""
    return {name: full_tensor(t).detach().cpu().contiguous() for name, t in unwrap(setup.model).state_dict().items()}


def summarize(
    plan: Plan, setup: Setup, tensors: dict[str, Tensor], metrics: dict[str, Any], rows: list[dict[str, Any]]
) -> dict[str, Any]:
    """Return everything that tables of results need to know about a run."""
    model = models.build(plan.recipe.model, setup.data.classes)
    model.load_state_dict(tensors)
    account = count(model, torch.zeros(1, *setup.data.shape, dtype=next(model.parameters()).dtype))
    return {
        "recipe": plan.name,
        "settings": dataclasses.asdict(plan.recipe),
        "classes": setup.data.classes,
        "shape": list(setup.data.shape),
        "method": plan.method,
        "options": dataclasses.asdict(setup.sparsifier.method),
        "accuracy": metrics["accuracy"],
        "sparsity": setup.sparsifier.sparsity,
        "parameters": account.parameters,
        "nonzero": account.nonzero,
        "flops": account.flops,
        "dense_flops": account.dense_flops,
        "unreadable": metrics["unreadable"],
        "seconds": sum(row["seconds"] for row in rows),
        "hardware": hardware(),
        "versions": {"optg": optg.__version__, "torch": torch.__version__, "python": platform.python_version()},
        "revision": revision(),
        "command": shlex.join(["optg", *sys.argv[1:]]),
    }


def hardware() -> str:
    """Return the GPU's name, or the processor's with the number of threads torch uses."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else f"{cpu_name()}, {torch.get_num_threads()} threads"
