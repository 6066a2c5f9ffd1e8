"""Which weights go first. A criterion is a function of the subject and a count; it returns masks without so many weights."""

import copy
import itertools
import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from optg.core.masks import keep_top
from optg.core.prunable import find_prunable
from optg.core.schedules import default_alpha, logistic
from optg.experiments.paradox.measure import Masks, Subject, in_training

Criterion = Callable[[Subject, int], Masks]


def lowest(subject: Subject, scores: list[Tensor], count: int) -> Masks:
    """Without the lowest scores, of the weights that are there."""
    ranked = [s.double().where(here, math.inf) for s, here in zip(scores, subject.present)]
    return keep_top(ranked, count, names=subject.names)


def loss_change(subject: Subject, count: int) -> Masks:
    """Eq. 4 with its sign, −g·w: those whose removal is said to lower the loss most."""
    return lowest(subject, [-g * w for g, w in zip(subject.gradient, subject.before)], count)


def snip(subject: Subject, count: int) -> Masks:
    """|g·w|."""
    return lowest(subject, [(g * w).abs() for g, w in zip(subject.gradient, subject.before)], count)


def taylor(subject: Subject, count: int) -> Masks:
    """Σ (g·w)² over batches."""
    return lowest(subject, subject.squares, count)


def magnitude(subject: Subject, count: int) -> Masks:
    return lowest(subject, [w.abs() for w in subject.before], count)


def random(seed: int) -> Criterion:
    def criterion(subject: Subject, count: int) -> Masks:
        generator = torch.Generator().manual_seed(seed)
        return lowest(subject, [torch.rand(w.shape, generator=generator).to(w.device) for w in subject.before], count)

    return criterion


def saved_scores(scores: list[Tensor]) -> Criterion:
    """OptG's, as its training has left them."""

    def criterion(subject: Subject, count: int) -> Masks:
        return lowest(subject, [s.to(w.device) for s, w in zip(scores, subject.before)], count)

    return criterion


def accumulated_scores(further: Callable[[], Iterable[Any]], steps: int, rounds: int) -> Criterion:
    """OptG's, trained now on weights that stay as they are: each step adds −dL/d(w⊙m)·w, of removed weights too (Eq. 10), and
    the mask is cut after each round, at a sparsity that rises by Eq. 15."""

    def criterion(subject: Subject, count: int) -> Masks:
        model = copy.deepcopy(subject.model).to(subject.dtype)
        layers = list(find_prunable(model, None, ()).values())
        weights = [layer.detach().clone() for layer in layers]
        scores, masks = [torch.zeros_like(w) for w in weights], subject.everything
        batches, alpha = iter(further()), default_alpha(rounds)
        in_training(model)
        for k in range(1, rounds + 1):
            for batch in itertools.islice(batches, math.ceil(steps * k / rounds) - math.ceil(steps * (k - 1) / rounds)):
                with torch.enable_grad():
                    value = subject.loss(model, batch)
                grads = torch.autograd.grad(value, layers, allow_unused=True, materialize_grads=True)
                torch._foreach_addcmul_(scores, list(grads), weights, value=-1.0)
            share = 1.0 if k == rounds else logistic(alpha * (k - rounds / 2))
            masks = lowest(subject, scores, math.ceil(share * count))
            with torch.no_grad():
                for layer, weight, mask in zip(layers, weights, masks):
                    layer.copy_(weight * mask)
        return masks

    return criterion
