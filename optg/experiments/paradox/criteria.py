"""Criteria that choose which weights to remove: functions of a subject and a count, which return masks."""

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
from optg.experiments.paradox.measure import Masks, MeasuredModel, set_deterministic_training

Criterion = Callable[[MeasuredModel, int], Masks]


def remove_lowest(subject: MeasuredModel, scores: list[Tensor], count: int) -> Masks:
    """Return masks that remove the nonzero weights with the lowest scores."""
    ranked = [s.double().where(nonzero, math.inf) for s, nonzero in zip(scores, subject.nonzero)]
    return keep_top(ranked, count, names=subject.names)


def loss_change(subject: MeasuredModel, count: int) -> Masks:
    """Score by −g·w (Eq. 4 with its sign): remove the weights whose removal is predicted to lower the loss most."""
    return remove_lowest(subject, [-g * w for g, w in zip(subject.gradient, subject.original)], count)


def snip(subject: MeasuredModel, count: int) -> Masks:
    """Score by |g·w|."""
    return remove_lowest(subject, [(g * w).abs() for g, w in zip(subject.gradient, subject.original)], count)


def taylor(subject: MeasuredModel, count: int) -> Masks:
    """Score by Σ (g·w)² over the batches."""
    return remove_lowest(subject, subject.squares, count)


def magnitude(subject: MeasuredModel, count: int) -> Masks:
    return remove_lowest(subject, [w.abs() for w in subject.original], count)


def random(seed: int) -> Criterion:
    def criterion(subject: MeasuredModel, count: int) -> Masks:
        generator = torch.Generator().manual_seed(seed)
        return remove_lowest(subject, [torch.rand(w.shape, generator=generator).to(w.device) for w in subject.original], count)

    return criterion


def saved_scores(scores: list[Tensor]) -> Criterion:
    """Use the scores that OptG has learned in training."""

    def criterion(subject: MeasuredModel, count: int) -> Masks:
        return remove_lowest(subject, [s.to(w.device) for s, w in zip(scores, subject.original)], count)

    return criterion


def accumulated_scores(training_batches: Callable[[], Iterable[Any]], steps: int, rounds: int) -> Criterion:
    """Learn OptG's scores now, with frozen weights.

    Each step adds −dL/d(w⊙m)·w, for removed weights too (Eq. 10). After each round the mask is cut, at a sparsity that rises as
    in Eq. 15.
    """

    def criterion(subject: MeasuredModel, count: int) -> Masks:
        model = copy.deepcopy(subject.model).to(subject.training_dtype)
        layers = list(find_prunable(model, None, ()).values())
        weights = [layer.detach().clone() for layer in layers]
        scores, masks = [torch.zeros_like(w) for w in weights], subject.all_kept
        batches, alpha = iter(training_batches()), default_alpha(rounds)
        set_deterministic_training(model)
        for k in range(1, rounds + 1):
            for batch in itertools.islice(batches, math.ceil(steps * k / rounds) - math.ceil(steps * (k - 1) / rounds)):
                with torch.enable_grad():
                    value = subject.loss(model, batch)
                grads = torch.autograd.grad(value, layers, allow_unused=True, materialize_grads=True)
                torch._foreach_addcmul_(scores, list(grads), weights, value=-1.0)
            share = 1.0 if k == rounds else logistic(alpha * (k - rounds / 2))
            masks = remove_lowest(subject, scores, math.ceil(share * count))
            with torch.no_grad():
                for layer, weight, mask in zip(layers, weights, masks):
                    layer.copy_(weight * mask)
        return masks

    return criterion
