"""The training loop. Time is the optimizer step: data order, learning rate, masks and checkpoints are functions of it."""

import time
import warnings
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn

from optg import data as datasets
from optg import models
from optg.data import Data
from optg.sparsifier import Sparsifier, sparsify
from optg.training import checkpoint, state
from optg.training.divergence import no_mask_of_nan, refuse_nan
from optg.training.evaluation import evaluate
from optg.training.folder import RunFolder
from optg.training.parallel import Parallel
from optg.training.rates import learning_rate
from optg.training.recipe import Plan, Recipe, build_method
from optg.training.report import Report
from optg.training.signals import Stop
from optg.training.step import Step


@dataclass
class Saving:
    minutes: float = 10.0  # between two checkpoints; after an epoch one is made if a tenth of that has passed
    keep: int = 2  # how many of the last to keep


@dataclass
class Setup:
    """What a plan builds, before the first step."""

    recipe: Recipe
    data: Data
    model: nn.Module
    optimizer: torch.optim.Optimizer
    sparsifier: Sparsifier
    step: Step


def set_up(plan: Plan, parallel: Parallel) -> Setup:
    """Data, model, optimizer and method of a plan. Nothing is written: what cannot be built leaves no trace."""
    recipe = plan.recipe
    torch.manual_seed(recipe.seed)
    torch.backends.cudnn.benchmark = True  # shapes are fixed: the fastest kernels are worth looking for
    data = datasets.load(
        recipe.data, recipe.folder, batch_size=recipe.batch_size, device=parallel.device, seed=recipe.seed, rank=parallel.rank,
        world=parallel.world,
    )  # fmt: skip
    model = models.build(recipe.model, data.classes).to(parallel.device)
    if recipe.channels_last:
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    model = parallel.wrap(model)
    optimizer = build_optimizer(recipe, model, parallel)
    criterion = nn.CrossEntropyLoss(label_smoothing=recipe.label_smoothing)
    sparsifier = sparsify(
        model, optimizer, build_method(plan), sparsity=recipe.sparsity, epochs=recipe.epochs,
        steps_per_epoch=data.steps_per_epoch, loss=lambda m, batch: criterion(m(batch[0]), batch[1]), batches=data.train(0),
    )  # fmt: skip
    forward: Any = torch.compile(model) if recipe.compile else model
    return Setup(recipe, data, model, optimizer, sparsifier, Step(forward, optimizer, sparsifier, criterion, recipe, parallel))


def train(setup: Setup, folder: RunFolder, parallel: Parallel, report: Report, saving: Saving) -> dict[str, Any]:
    """Train to the end, going on from the folder's newest checkpoint. Returns the last epoch's metrics."""
    recipe, data, model, optimizer, sparsifier, step = (getattr(setup, field.name) for field in fields(setup))
    resume(folder, model, optimizer, sparsifier, report, parallel)
    clock, saved, metrics = sparsifier.clock, time.monotonic(), (folder.metrics() or [{}])[-1]

    def save() -> None:
        nonlocal saved
        tensors, values = state.gather(model, optimizer, sparsifier)
        if parallel.first:
            checkpoint.save(folder.checkpoints, clock.step, tensors, values, saving.keep)
        saved = time.monotonic()

    model.train()
    with Stop() as stop:
        while not clock.finished:
            epoch, done = divmod(clock.step, data.steps_per_epoch)
            started, losses = time.monotonic(), list[Tensor]()
            for images, labels in data.train(epoch, start=done):
                rate = learning_rate(recipe, clock)
                with no_mask_of_nan(losses, model, folder, clock):
                    losses.append(step(images, labels, rate))
                report.step(sparsifier, losses, recipe.batch_size)
                asked, late = stop.asked(parallel), parallel.any(time.monotonic() - saved > 60 * saving.minutes)
                if asked or late:
                    refuse_nan(losses, model, folder, clock)
                    save()
                if asked:
                    stop.leave(f"stopped at step {clock.step} of {clock.total}; the same command goes on from there")
            refuse_nan(losses, model, folder, clock)
            seconds = time.monotonic() - started
            metrics = {
                "step": clock.step, "epoch": epoch + 1, "loss": float(torch.stack(losses).mean()),
                **evaluate(model, data, recipe, parallel), "sparsity": sparsifier.sparsity, "lr": rate, "seconds": seconds,
                "images_per_second": len(losses) * recipe.batch_size / seconds,
            }  # fmt: skip
            if parallel.first:
                folder.log(metrics)
            report.metrics(metrics, recipe.epochs)
            if clock.finished or parallel.any(time.monotonic() - saved > 6 * saving.minutes):
                save()
    sparsifier.finish()
    return metrics


def build_optimizer(recipe: Recipe, model: nn.Module, parallel: Parallel) -> torch.optim.Optimizer:
    cuda = parallel.device.type == "cuda"
    groups: list[dict[str, Any]] = [{"params": list(model.parameters())}]
    if not recipe.decay_norms:
        matrices = [p for p in model.parameters() if p.ndim >= 2]
        rest = [p for p in model.parameters() if p.ndim < 2]
        groups = [{"params": matrices}, {"params": rest, "weight_decay": 0.0}]
    rate = torch.tensor(recipe.lr, device=parallel.device) if cuda else recipe.lr  # a CUDA graph reads it from the device
    if recipe.optimizer == "adamw":
        return torch.optim.AdamW(groups, lr=rate, weight_decay=recipe.weight_decay, fused=cuda)
    return torch.optim.SGD(
        groups, lr=rate, momentum=recipe.momentum, weight_decay=recipe.weight_decay, nesterov=recipe.nesterov, fused=cuda
    )


def resume(
    folder: RunFolder,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    sparsifier: Sparsifier,
    report: Report,
    parallel: Parallel,
) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = checkpoint.load_newest(folder.checkpoints)
    for warning in caught:
        report.say(str(warning.message))
    if found is None:
        return
    path, tensors, values = found
    state.restore(model, optimizer, sparsifier, tensors, values)
    if parallel.first:  # one process writes
        folder.forget_after(sparsifier.clock.step)
    report.say(f"going on from {path.name}")
