"""Build what a run needs before its first step: data, model, optimizer and sparsifier."""

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from optg import data as datasets
from optg import models
from optg.core.assignment import as_rules, implied_sparsity
from optg.core.channels import coupled_channels
from optg.core.preserve import preserve_model
from optg.data import Data
from optg.methods import Method
from optg.sparsifier import Sparsifier, sparsify
from optg.training.parallel import Parallel
from optg.training.quantization import Int8, Quantization, end_before, refuse_late_target, refuse_unsupported
from optg.training.recipe import Plan, Recipe, RecipeError, build_method
from optg.training.step import TrainStep


@dataclass
class Setup:
    recipe: Recipe
    data: Data
    model: nn.Module
    optimizer: torch.optim.Optimizer
    sparsifier: Sparsifier
    step: TrainStep
    method: Method  # the sparsifier's, until it is frozen
    quantization: Quantization | None = None

    def quantize_if_due(self) -> None:
        """When the quantized part of training begins, freeze the masks and train the model's twin."""
        if self.quantization and self.quantization.due(self.sparsifier.clock):
            self.sparsifier.freeze()
            self.step.call(self.quantization.twin)
            self.quantization.active = True


def set_up(plan: Plan, parallel: Parallel, int8: Int8 | None = None) -> Setup:
    """Build everything a run needs. Writes no files, so a failure leaves no trace.

    Args:
        int8: the functions behind `--quantize int8`, if the recipe asks for it.
    """
    recipe = plan.recipe
    if recipe.quantize:
        assert int8, "a recipe with quantize needs optg.deploy.qat"
        refuse_unsupported(recipe, parallel, int8)
    torch.manual_seed(recipe.seed)
    torch.backends.cudnn.benchmark = True  # all batches have one shape, so searching for the fastest kernels pays
    data = datasets.load(
        recipe.data, recipe.folder, batch_size=recipe.batch_size, device=parallel.device, seed=recipe.seed, rank=parallel.rank,
        world=parallel.world, validate=recipe.validate,
    )  # fmt: skip
    if recipe.max_steps:
        recipe = fit_max_steps(recipe, data.steps_per_epoch)
    model = models.build(recipe.model, data.classes, recipe.model_options).to(parallel.device)
    image = torch.zeros(1, *data.shape, device=parallel.device, dtype=next(model.parameters()).dtype)
    advice = models.advise_on_size(
        recipe.model, model, data.shape, f"choose another --model, or other --data than {recipe.data}"
    )
    with models.explain_shape_errors(recipe.model, data.shape, advice), preserve_model(model), torch.no_grad():
        model.eval()(image)
    wants_channels = any(structure == "channel" for _, structure in as_rules(recipe.structure))
    example = coupled_channels(model, image) if wants_channels else None  # before FSDP2 splits the model
    if recipe.channels_last:
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    model = parallel.wrap(model)
    optimizer = build_optimizer(recipe, model, parallel)
    criterion = nn.CrossEntropyLoss(label_smoothing=recipe.label_smoothing)
    method = build_method(plan)
    if recipe.quantize:
        method = end_before(method, recipe.quantize_from)
    sparsity = recipe.sparsity if method.needs_target else recipe.sparsity or None
    if sparsity == implied_sparsity(recipe.structure):
        sparsity = None  # the layers decide: one may be too small for the rule whose sparsity this is
    sparsifier = sparsify(
        model, optimizer, method, sparsity=sparsity, **length_of_training(recipe, data), structure=recipe.structure,
        example=example, floor=recipe.floor or 0.0, floor_by=recipe.floor_by,
        loss=lambda m, batch: criterion(m(batch[0]), batch[1]), batches=data.train(0),
    )  # fmt: skip
    forward: Any = torch.compile(model) if recipe.compile and parallel.device.type == "cuda" else model
    if recipe.cycles == 1:  # unless the recipe says otherwise, the learning rate follows the method's cycles
        recipe = dataclasses.replace(recipe, cycles=sparsifier.method.cycles)
    step = TrainStep(forward, optimizer, sparsifier, criterion, recipe, parallel)
    quantization = None
    if recipe.quantize:
        assert int8
        start = round(recipe.quantize_from * sparsifier.clock.total)
        refuse_late_target(plan.method, sparsifier.method, sparsifier.clock, start)
        quantization = Quantization(int8, model, torch.cat([image, image]), start)
    return Setup(recipe, data, model, optimizer, sparsifier, step, sparsifier.method, quantization)


def fit_max_steps(recipe: Recipe, steps_per_epoch: int) -> Recipe:
    """Return the recipe with the number of epochs that `max_steps` begins."""
    assert recipe.max_steps is not None
    if recipe.warmup * steps_per_epoch >= recipe.max_steps:
        raise RecipeError(
            f"warmup is {recipe.warmup:g} epochs of {steps_per_epoch} steps; expected fewer steps than max_steps, which is "
            f"{recipe.max_steps}"
        )
    return dataclasses.replace(recipe, epochs=math.ceil(recipe.max_steps / steps_per_epoch))


def length_of_training(recipe: Recipe, data: Data) -> dict[str, Any]:
    """Return the arguments of `sparsify` that say how long training is."""
    if recipe.max_steps:
        return {"steps": recipe.max_steps}
    return {"epochs": recipe.epochs, "steps_per_epoch": data.steps_per_epoch}


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
