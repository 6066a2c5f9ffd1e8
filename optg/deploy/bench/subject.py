"""The model to measure: a trained one, or one by name with random weights and masks."""

import inspect
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from optg import models, trust
from optg.core.budgets import layer_zeros
from optg.core.prunable import find_prunable
from optg.deploy import packed
from optg.deploy.export import Trained, account_of, open_trained
from optg.deploy.graph import as_float, capture, is_quantized
from optg.deploy.packed import About, PackedModel
from optg.training.recipe import refuse_model_options


@dataclass
class Subject:
    """What to measure. All fields but the first apply only to a model given by name."""

    what: str  # a run, a checkpoint, a packed file, or the name of a model
    sparsity: float | None = None  # of the random masks; 0.9 if None
    classes: int | None = None  # the model's usual number if None
    shape: tuple[int, int, int] | None = None  # channels, height, width; the model's usual shape if None
    model_options: dict[str, Any] = field(default_factory=dict)  # keyword arguments of the model


def open_subject(subject: Subject) -> Trained:
    """Open the trained model, or build the named one."""
    path = Path(subject.what)
    if path.exists() or "/" in subject.what:
        if given := [name for name in ("sparsity", "classes", "shape") if getattr(subject, name) is not None]:
            raise ValueError(f"{path} is measured as it is; leave out --{given[0]}, which applies to models given by name")
        refuse_model_options(path, subject.model_options)
        return open_trained(path)
    trust.allow(subject.what)
    sparsity = 0.9 if subject.sparsity is None else subject.sparsity
    if not 0 <= sparsity < 1:
        raise ValueError(f"--sparsity is {sparsity:g}; expected at least 0 and below 1")
    classes = subject.classes or usual_classes(subject.what)
    shape = subject.shape or ((3, 224, 224) if classes == 1000 else models.small_images(subject.what))
    torch.manual_seed(0)
    model = models.build(subject.what, classes, subject.model_options)
    prune_at_random(model, sparsity)
    advice = models.advise_on_size(subject.what, model, shape, "give another --shape")
    with models.explain_shape_errors(subject.what, shape, advice):
        settle_norms(model, shape)
    options = f"({models.as_arguments(subject.model_options)})" if subject.model_options else ""
    name = f"{subject.what}{options} with random weights and random ERK masks of sparsity {sparsity:g}"
    return Trained(model.eval(), About(name, classes, shape, account=account_of(model, torch.zeros(1, *shape))))


def usual_classes(name: str) -> int:
    """Return 1000 for ImageNet models, 10 for models of small images."""
    if name not in models.MODELS:
        return 1000
    return inspect.signature(models.MODELS[name]).parameters["classes"].default


@torch.no_grad()
def prune_at_random(model: nn.Module, sparsity: float) -> None:
    """Set random weights to zero, as many in each layer as the Erdős–Rényi-Kernel budget says."""
    weights = list(find_prunable(model, None, ()).values())
    for weight, zeros in zip(weights, layer_zeros("erk", [w.shape for w in weights], sparsity)):
        weight.view(-1)[torch.randperm(weight.numel())[:zeros]] = 0.0


@torch.no_grad()
def settle_norms(model: nn.Module, shape: tuple[int, ...]) -> None:
    """Feed batch norms some noise, so that activations have a realistic size instead of shrinking from layer to layer."""
    norms = [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    momenta = {norm: norm.momentum for norm in norms}
    for norm in norms:
        norm.momentum = None  # use the plain average
    model.train()
    model(torch.randn(4, *shape))
    for norm, momentum in momenta.items():
        norm.momentum = momentum


def float_and_int8(trained: Trained) -> tuple[nn.Module, nn.Module | None]:
    """Return the model in float, for most engines, and in int8 if the file holds that: then both have the same weights."""
    graph = capture(trained.model, trained.example)
    if not is_quantized(graph):
        return trained.model, None
    return PackedModel(as_float(graph), trained.about), trained.model


def describe_subject(trained: Trained) -> dict[str, Any]:
    """Return name, size in bytes, non-zeros and FLOPs."""
    graph = capture(trained.model, trained.example)
    dense = sum(t.numel() * t.element_size() for t in as_float(graph).tensors.values())
    size = trained.path.stat().st_size if trained.path else len(packed.pack(graph, trained.about))
    return {"name": trained.about.name, "packed_bytes": size, "dense_bytes": dense, **trained.about.account}
