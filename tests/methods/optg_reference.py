"""OptG as the paper writes it, slow and obvious: autograd through w · STE(score), one optimizer for weights and scores."""

import math

import torch
from torch import nn


class StraightThrough(torch.autograd.Function):
    """Return the mask in forward; in backward pass its gradient on to the score (Eq. 6)."""

    @staticmethod
    def forward(ctx, score, mask):
        return mask.to(score.dtype)

    @staticmethod
    def backward(ctx, grad):
        return grad, None


def train(model, batches, names, *, sparsity, epochs, alpha, lr, momentum, weight_decay, score_momentum=0.9):
    """Yield (masks, weights, scores) after each epoch's cut and at the end."""
    steps = len(batches) // epochs
    weights = {n: p.detach().clone().requires_grad_() for n, p in model.named_parameters()}
    scores = {n: torch.zeros_like(weights[n], requires_grad=True) for n in names}
    masks = {n: torch.ones_like(weights[n]) for n in names}
    optimizer = torch.optim.SGD(
        [
            {"params": list(weights.values()), "momentum": momentum, "weight_decay": weight_decay},
            {"params": list(scores.values()), "momentum": score_momentum, "weight_decay": 0.0},
        ],
        lr=lr,
    )
    for k in range(1, epochs + 1):
        growth = 1 / (1 + math.exp(-alpha * (k - epochs / 2)))
        rate = lr * (1 + math.cos(math.pi * (k - 1) / epochs)) / 2
        optimizer.param_groups[0]["lr"], optimizer.param_groups[1]["lr"] = rate, rate * growth  # Eq. 16
        if k > 1:
            everything = torch.cat([scores[n].detach().flatten() for n in names])
            zeros = math.ceil(sparsity * (1.0 if k == epochs else growth) * len(everything))  # Eq. 15
            keep = torch.ones_like(everything)
            keep[everything.sort(stable=True).indices[:zeros]] = 0  # Eq. 5
            for n, part in zip(names, keep.split([masks[n].numel() for n in names])):
                masks[n] = part.view_as(masks[n])
            yield snapshot(masks, weights, scores)
        for x, y in batches[(k - 1) * steps : k * steps]:
            sparse = {n: w * StraightThrough.apply(scores[n], masks[n]) if n in scores else w for n, w in weights.items()}
            optimizer.zero_grad()
            nn.functional.cross_entropy(torch.func.functional_call(model, sparse, x), y).backward()
            optimizer.step()
    yield snapshot(masks, weights, scores)


def snapshot(*groups):
    return tuple({n: t.detach().clone() for n, t in group.items()} for group in groups)
