"""A run from its plan to its folder: what `optg train` does, and what later commands read back."""

import contextlib
import dataclasses
import json
import platform
import shlex
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
from optg.core.accounting import count
from optg.core.prunable import unwrap
from optg.machine import cpu_name, revision
from optg.training import recipe
from optg.training.checkpoint import TENSORS, Damaged, is_checkpoint, list_steps, load
from optg.training.folder import RunFolder, is_run
from optg.training.loop import Saving, train
from optg.training.parallel import Parallel
from optg.training.recipe import Plan
from optg.training.report import Report
from optg.training.setup import Setup, set_up
from optg.training.state import whole


def name_of(plan: Plan) -> str:
    """A folder's name from what makes the run what it is."""
    return f"{plan.name.replace(':', '-')}-{plan.method}-{plan.recipe.sparsity:g}-seed{plan.recipe.seed}"


def run(
    plan: Plan, path: Path, parallel: Parallel, saving: Saving, console: Console, tensorboard: bool = False
) -> dict[str, Any]:
    """Train, or go on training, and leave recipe, metrics, summary and model in the folder."""
    folder = RunFolder(path)
    if (summary := ended(plan, folder)) is not None:
        return summary if parallel.first else {}
    setup = set_up(plan, parallel)
    if not parallel.first:
        with Report(path.name, console, silent=True) as report:
            train(setup, folder, parallel, report, saving)
            gather_model(setup)
            return {}  # the first process sums it up
    with folder.locked(), Report(path.name, console, board=path if tensorboard else None) as report:
        folder.write("recipe.toml", recipe.dump(plan))
        metrics = train(setup, folder, parallel, report, saving)
        tensors = gather_model(setup)
        summary = summary_of(plan, setup, tensors, metrics, folder.metrics()) | {"processes": parallel.world}
        folder.write_tensors("model.safetensors", tensors)
        folder.write("summary.json", json.dumps(summary, indent=2) + "\n")
        return summary


def ended(plan: Plan, folder: RunFolder) -> dict[str, Any] | None:
    """The summary of a run that was trained to its end: by whom and with what stays written there."""
    refuse_other_plan(plan, folder)
    if not is_run(folder.path) or not (folder.path / "model.safetensors").is_file():
        return None
    summary = read_json(folder.path / "summary.json")
    complete = isinstance(summary, dict) and {"accuracy", "sparsity", "flops", "dense_flops"} <= summary.keys()
    return summary if complete else None


def refuse_other_plan(plan: Plan, folder: RunFolder) -> None:
    """A folder belongs to one recipe, as soon as there is something in it to lose."""
    path = folder.path / "recipe.toml"
    if not path.exists() or not (list_steps(folder.checkpoints) or folder.metrics() or (folder.path / "summary.json").exists()):
        return
    before, now = (
        {line for line in text.splitlines() if not line.startswith("folder = ")}  # data may have moved
        for text in (path.read_text(errors="replace"), recipe.dump(plan))
    )
    if before != now:
        new, gone = ("; ".join(line for line in sorted(lines) if line) for lines in (now - before, before - now))
        changed = f"{new} is new" if new else f"{gone} is gone"
        raise recipe.RecipeError(f"{folder.path} holds a run with another recipe ({changed}); give another --output")


def gather_model(setup: Setup) -> dict[str, Tensor]:
    """The trained tensors, whole. Every process must call this: what is split is joined."""
    return {name: whole(t).detach().cpu().contiguous() for name, t in unwrap(setup.model).state_dict().items()}


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
        "command": shlex.join(["optg", *sys.argv[1:]]),
    }


def hardware() -> str:
    """Return the GPU's name, or the processor's with the number of threads torch uses."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else f"{cpu_name()}, {torch.get_num_threads()} threads"


def reopen(path: Path, classes: int) -> tuple[Plan, nn.Module]:
    """The plan and the model of a run's folder, or of one of its checkpoints."""
    saved = is_checkpoint(path)
    home = path.resolve().parents[1] if saved else path
    if not is_run(home):
        raise recipe.RecipeError(f"{home} is not the folder of a run: it has no recipe.toml")
    plan = recipe.load(str(home / "recipe.toml"))
    model = models.build(plan.recipe.model, classes)
    weights = path / (TENSORS if saved else "model.safetensors")
    if not weights.exists():
        raise recipe.RecipeError(f"{path} has no model.safetensors yet: its run has not ended; go on with it first")
    try:
        tensors = open_checkpoint(path)[0] if saved else load_file(weights)
        model.load_state_dict({n.removeprefix("model."): t for n, t in tensors.items() if n.startswith("model.") or not saved})
    except (SafetensorError, RuntimeError) as error:
        reason = " ".join(line.strip() for line in str(error).splitlines()[:2])
        raise recipe.RecipeError(f"{weights} is damaged or of another model: {reason}") from None
    return plan, model


def open_checkpoint(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    try:
        return load(path)
    except Damaged as error:
        others = [other.name for other in list_steps(path.parent) if other.name != path.name]
        raise recipe.RecipeError(f"checkpoint {path} is damaged ({error}); beside it: {', '.join(others) or 'none'}") from None


def facts_of(path: Path) -> dict[str, Any]:
    """What a run's summary or a checkpoint says, `classes` and `shape` of the images among it."""
    saved, summary = is_checkpoint(path), path / "summary.json"
    if not saved and not summary.is_file():
        steps = list_steps(path / "checkpoints")
        hint = f"; {steps[-1]} can be given instead" if steps else ""
        raise recipe.RecipeError(f"{path} has no summary.json: it is not the folder of a run, or the run has not ended{hint}")
    facts = open_checkpoint(path)[1] if saved else read_json(summary)
    try:
        classes, shape = int(facts["classes"]), tuple(map(int, facts["shape"]))
    except (ValueError, KeyError, TypeError):
        classes, shape = 0, ()
    if classes < 1 or not shape or min(shape) < 1:
        where = path if saved else summary
        raise recipe.RecipeError(f"{where} is damaged, or of another version: it does not say classes and shape")
    return {**facts, "classes": classes, "shape": shape}


def inputs_of(path: Path) -> tuple[int, tuple[int, ...]]:
    """The classes that a run's or a checkpoint's model tells apart, and the shape of its images."""
    facts = facts_of(path)
    return facts["classes"], facts["shape"]


def read_json(path: Path) -> Any:
    """None where there is no such file, or a damaged one."""
    with contextlib.suppress(OSError, ValueError):
        return json.loads(path.read_text())
    return None
