"""A run from its plan to its folder: what `optg train` does, and what later commands read back."""

import dataclasses
import json
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

import optg
from optg import models
from optg.accounting import count
from optg.training import recipe
from optg.training.folder import RunFolder, is_run
from optg.training.loop import Saving, train
from optg.training.parallel import Parallel
from optg.training.recipe import Plan
from optg.training.report import Report
from optg.training.setup import Setup, set_up
from optg.training.state import whole
from optg.weights import bare


def name_of(plan: Plan) -> str:
    """A folder's name from what makes the run what it is."""
    return f"{plan.name}-{plan.method}-{plan.recipe.sparsity:g}-seed{plan.recipe.seed}"


def run(
    plan: Plan, path: Path, parallel: Parallel, saving: Saving, console: Console, tensorboard: bool = False
) -> dict[str, Any]:
    """Train, or go on training, and leave recipe, metrics, summary and model in the folder."""
    folder, setup = RunFolder(path), set_up(plan, parallel)
    if not parallel.first:
        with Report(path.name, console, silent=True) as report:
            train(setup, folder, parallel, report, saving)
            gather_model(setup)
            return {}  # the first process sums it up
    refuse_other_plan(plan, folder)
    with folder.locked(), Report(path.name, console, board=path if tensorboard else None) as report:
        folder.write("recipe.toml", recipe.dump(plan))
        metrics = train(setup, folder, parallel, report, saving)
        tensors = gather_model(setup)
        summary = summary_of(plan, setup, tensors, metrics, folder.metrics())
        folder.write_tensors("model.safetensors", tensors)
        folder.write("summary.json", json.dumps(summary, indent=2) + "\n")
        return summary


def refuse_other_plan(plan: Plan, folder: RunFolder) -> None:
    path = folder.path / "recipe.toml"
    if path.exists() and path.read_text() != recipe.dump(plan):
        before, now = (set(text.splitlines()) for text in (path.read_text(), recipe.dump(plan)))
        changed = "; ".join(sorted(now - before) or sorted(before - now))
        raise recipe.RecipeError(f"{folder.path} holds a run with another recipe ({changed} is new); give another --output")


def gather_model(setup: Setup) -> dict[str, Tensor]:
    """The trained tensors, whole. Every process must call this: what is split is joined."""
    return {name: whole(t).detach().cpu().contiguous() for name, t in bare(setup.model).state_dict().items()}


def summary_of(
    plan: Plan, setup: Setup, tensors: dict[str, Tensor], metrics: dict[str, Any], rows: list[dict[str, Any]]
) -> dict[str, Any]:
    """All that a table of results needs to know of a run."""
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
        "command": " ".join(["optg", *sys.argv[1:]]),
    }


def hardware() -> str:
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    return f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads"


def revision() -> str | None:
    """Of the source, where it is a git checkout."""
    here = Path(__file__).parent
    found = subprocess.run(["git", "-C", here, "rev-parse", "HEAD"], capture_output=True, text=True)
    return found.stdout.strip() or None


def reopen(path: Path, classes: int) -> tuple[Plan, nn.Module]:
    """The plan and the trained model of a run's folder."""
    if not is_run(path):
        raise recipe.RecipeError(f"{path} is not the folder of a run: it has no recipe.toml")
    plan = recipe.load(str(path / "recipe.toml"))
    model = models.build(plan.recipe.model, classes)
    weights = path / "model.safetensors"
    if not weights.exists():
        raise recipe.RecipeError(f"{path} has no model.safetensors yet: its run has not ended; go on with it first")
    try:
        model.load_state_dict(load_file(weights))
    except (SafetensorError, RuntimeError) as error:
        raise recipe.RecipeError(f"{weights} is damaged or of another model: {str(error).splitlines()[0]}") from None
    return plan, model
