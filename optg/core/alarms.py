"""Warnings about the sparse model: layers that lost every weight, and a sparsity other than the target at the end."""

import warnings
from typing import Any

import torch
from torch import nn

from optg.core.clock import Clock
from optg.core.truth import refuse_nonfinite
from optg.core.weights import SparseWeights


class CollapseWatch:
    """Warns about layers and parts of layers that have lost every weight: no signal passes through them."""

    def __init__(self, method: str, weights: SparseWeights) -> None:
        self.method, self.weights = method, weights
        self.known: dict[str, set[int]] = {name: set() for name in weights.names}  # the parts that were warned of

    def warn(self, clock: Clock, stacklevel: int = 6) -> None:
        """Warn once of each collapsed layer or part; raise if weights are not finite. Waits for the device."""
        self.weights.check()
        refuse_nonfinite(self.weights)
        for layer, zeros in enumerate(self.weights.counts[:, 0].tolist()):
            name, gone = self.weights.names[layer], collapsed_parts(self.weights, layer, zeros)
            if new := sorted(gone - self.known[name]):
                self.known[name] |= gone
                parts, floor = self.weights.axes[layer].parts, min(0.02, (1 - self.weights.target) / 5)
                some = f"weights of part {', '.join(map(str, new))} of {parts}"  # an expert, the keys of an attention layer …
                warnings.warn(
                    f"layer collapse: {self.method} has removed all {some if len(gone) < parts else f'{zeros} weights'} of "
                    f"{name} at step {clock.step}. sparsify(..., floor={floor:.2g}) keeps {100 * floor:.2g} % of every layer",
                    stacklevel=stacklevel,
                )


def collapsed_parts(weights: SparseWeights, layer: int, zeros: int) -> set[int]:
    """Return the parts of a layer, counted from 1, that have lost every weight. A layer that FSDP2 has split counts whole."""
    axes, size = weights.axes[layer], weights.shapes[layer].numel()
    if zeros == size:
        return set(range(1, axes.parts + 1))
    if zeros * axes.parts < size or axes.parts == 1 or (weights.shards and weights.shards.pieces[layer]):
        return set()
    mask = weights.masks[layer].unflatten(axes.stacked, (axes.parts, -1)).movedim(axes.stacked, 0)
    return {part for part, kept in enumerate(mask.flatten(1).any(1).tolist(), 1) if not kept}


class ZerosWatch:
    """Warns if a model is sparse already: if over 10 % of its kept weights are exactly 0, not counting layers that are all 0.

    The warning waits for the first step: a run that resumes has zeros too, and loads its state before that. The first step
    looks again, because a checkpoint may have been loaded since `sparsify`.
    """

    def __init__(self, weights: SparseWeights, expected: bool) -> None:
        self.weights = weights
        self.share = 0.0 if expected else self.measure()

    def measure(self) -> float:
        """Return the share of zeros among the weights that the masks keep. Waits for the device."""
        masks = self.weights.masks
        zeros = self.weights.mask_set.count_nonzero([(v == 0) & mask for v, mask in zip(self.weights.values, masks)])
        kept = self.weights.mask_set.count_nonzero(masks)
        layers = [counts for counts in torch.stack([zeros, kept], 1).tolist() if counts[0] < counts[1]]
        return sum(zeros for zeros, _ in layers) / max(1, sum(kept for _, kept in layers))

    def warn(self) -> None:
        share = max(self.share, self.measure())
        if share > 0.1:
            warnings.warn(
                f"{share:.0%} of the weights were exactly 0 before training: the model is sparse already. To keep its zeros, "
                "load the model first, then call sparsify with method='keep'; to continue an interrupted run, load the "
                "sparsifier's state; otherwise go on, and they are trained like any other weight",
                stacklevel=5,
            )


class FrozenWatch:
    """Warns if weights that were frozen when `sparsify` was called are trained later: they stay dense."""

    def __init__(self, frozen: dict[str, nn.Parameter]) -> None:
        self.frozen = frozen

    def warn(self) -> None:
        """Warn of each weight once. Called at every step, so it only looks at flags of the frozen weights."""
        trained = [name for name, p in self.frozen.items() if p.requires_grad]
        if not trained:
            return
        self.frozen = {name: p for name, p in self.frozen.items() if name not in trained}
        warnings.warn(
            "some weights were frozen when sparsify was called and are trained now, so they stay dense: "
            f"{', '.join(trained[:3])}{' …' if len(trained) > 3 else ''}. To prune them too, unfreeze them before sparsify",
            stacklevel=5,
        )


def reach_target(weights: SparseWeights, method: Any, name: str, clock: Clock) -> bool:
    """Make a last cut, with a warning, if training ended short of the target. Return whether it did."""
    target = weights.target
    if not method.needs_target:
        return False
    if method.learns_sparsity:
        if abs(weights.sparsity - target) > 0.01:
            warnings.warn(
                f"training ended at sparsity {weights.sparsity:.4f}, not {target}: {name} learns its sparsity, which depends "
                f"on its options ({method})",
                stacklevel=4,
            )
        return False
    if not any(weights.missing_zeros()):
        return False
    warnings.warn(
        f"training ended at sparsity {weights.sparsity:.4f}, short of {target}: {clock.step} optimizer steps were seen, but "
        f"{clock.announced}. One last cut brings it to {target}, with no training after it",
        stacklevel=4,
    )
    weights.show_latent()
    method.cut(weights, target)
    weights.check()
    weights.show_effective()
    return True
