"""The prunable weights of a model as parallel lists: effective weights, latent weights and the masks between them.

Between steps a Parameter holds the *effective* weight: its value if the mask keeps it, 0.0 if not. A kept weight is stored
only in the Parameter, so values that others write there take effect. The *latent* value of a dormant weight, for methods that
keep it, is stored in `latent`; it is in the Parameter only while the optimizer steps.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from optg.core.assignment import Assignment
from optg.core.exchange import exchange
from optg.core.layer_kinds import Axes
from optg.core.masks import Masks
from optg.core.optimizer_state import clear_state
from optg.core.parameters import ParameterLists
from optg.core.passes import choose
from optg.core.passes.reference import SoftThreshold
from optg.core.pools import make_pools
from optg.core.ranking import Zeros
from optg.core.structures import Unstructured


class SparseWeights(ParameterLists):
    """Parameters with masks and latent weights; entry i of each list belongs to layer i."""

    def __init__(
        self,
        parameters: dict[str, nn.Parameter],
        optimizer: Any,  # torch's, or a JointOptimizer
        target: float,
        axes: list[Axes] | None = None,
        model: nn.Module | None = None,
        assignment: Assignment | None = None,
    ) -> None:
        super().__init__(parameters, optimizer, axes, model)
        self.target = target  # the sparsity at the end of training
        self.passes = choose(self.values)
        single = [Unstructured()] * len(self.names)
        self.assignment = assignment or Assignment(parameters, self.axes, single)
        pools = make_pools(self.assignment.structures, self.names, self.shapes, self.axes, self.shards, self.passes)
        self.mask_set = Masks(self.values, pools, self.shards, self.passes)
        self.ranked = [layer for layer, name in enumerate(self.names) if name not in self.assignment.followers]
        self.size = sum(self.shapes[layer].numel() for layer in self.ranked)
        self.unstructured = all(type(pool.structure) is Unstructured for pool in pools)
        self._ratios: list[Tensor] = []  # see `threshold_ratio`; filled while effective weights are computed
        self.latent: list[Tensor] | None = None  # latent values of dormant weights; of all weights if `effective` is set
        self.effective: Callable[[int, Tensor], Tensor] | None = None  # (layer, latent) -> effective, before the mask
        self.soft_threshold: Callable[[], SoftThreshold | None] = lambda: None  # the same function, if it is a soft threshold

    # ---- the lists

    @property
    def masks(self) -> list[Tensor]:
        return self.mask_set.tensors

    @property
    def counts(self) -> Tensor:
        """Per layer: zeros, and the weights that the last change of the mask removed and revived. A new tensor per change."""
        return self.mask_set.counts

    @property
    def sparsity(self) -> float:
        """The share of weights that the masks remove. Waits for the device."""
        return int(self.counts[self.ranked, 0].sum()) / self.size

    # ---- effective and latent weights in the parameters

    def show_latent(self) -> None:
        """Set the parameters to the latent weights."""
        if self.latent is None:
            return
        values = self.values
        if values[0].dtype != self.latent[0].dtype:  # the model's dtype was changed since
            self.latent = [latent.to(value.dtype) for latent, value in zip(self.latent, values)]
        values, latent = self.stepping(values), self.stepping(self.latent)
        if self.effective is None:
            self.passes.restore(values, self.stepping(self.masks), latent)
        else:
            torch._foreach_copy_(values, latent)

    def show_effective(self) -> None:
        """Set the parameters to the effective weights. Removed weights become 0.0, whatever they were (NaN too)."""
        values, masks = self.stepping(self.values), self.stepping(self.masks)
        if self.latent is None or self.effective is None:
            self.passes.mask(values, masks)
            return
        effective, threshold = self.effective, self.soft_threshold()
        if threshold and not self.unstructured:
            self.measure_ratios(self.latent, threshold.thresholds)
            threshold = threshold._replace(ratios=self.stepping(self._ratios))
        if threshold and threshold.rescale and any(axes.neurons != [0] for axes in self.axes):
            threshold = None  # kernels rescale rows
        if (active := self.active) is not None:
            whole = self.effective

            def effective(i: int, latent: Tensor) -> Tensor:
                return whole(active[i], latent)

            threshold = threshold and threshold._replace(thresholds=threshold.thresholds.index_select(0, self.active_index))
        self.passes.soften(values, masks, self.stepping(self.latent), effective, threshold)
        self._ratios = []
        self.mask_set.show_protected(values, masks, self.stepping(self.latent))

    def measure_ratios(self, latent: Sequence[Tensor], thresholds: Tensor) -> None:
        """Compute what `threshold_ratio` returns, where weights are removed together."""
        self._ratios = [] if self.unstructured else self.mask_set.ratios(latent, thresholds)

    def threshold_ratio(self, layer: int) -> Tensor | None:
        """Return threshold / magnitude of what is removed together with each weight; None if single weights are removed."""
        return self._ratios[layer] if self._ratios else None

    def settle(self) -> None:
        """Store the latent weights that the optimizer left in the parameters, then show the effective ones."""
        if self.latent is not None and self.effective is None:
            self.passes.settle(self.stepping(self.values), self.stepping(self.masks), self.stepping(self.latent))
        else:
            self.store_latent()
            self.show_effective()

    def store_latent(self) -> None:
        """Copy the parameters to `latent`."""
        if self.latent is not None:
            torch._foreach_copy_(self.stepping(self.latent), self.stepping(self.values))

    # ---- gradients

    def mask_gradients(self, share: float = 0.0, masks: Sequence[Tensor] | None = None) -> None:
        """Multiply the gradients of removed weights by `share`. `masks` are used instead of the weights' own."""
        if share != 1 and (grads := {i: grad for i, grad in self.grads.items() if self.gradient_share(i, share) != 1}):
            masks = masks or self.masks
            self.passes.mask(list(grads.values()), [masks[layer] for layer in grads], share)

    def sum_signed_gradients(self) -> Tensor:
        """Zero the gradients of removed weights, then return Σ g · sign(w) of each layer."""
        sums = torch.zeros(len(self.names), dtype=self.state_dtype, device=self.devices[0])
        if grads := self.grads:
            masks, values = self.masks, self.values
            lists = list(grads.values()), [masks[i] for i in grads], [values[i] for i in grads]
            found = self.passes.sum_signed(*lists, sums.dtype)
            torch._foreach_copy_([sums[i] for i in grads], found)
        return self.mask_set.total(sums)

    # ---- new masks

    def cut(self, scores: Sequence[Tensor], sparsity: float, budget: str = "global") -> Tensor:
        """Keep the largest scores, of all layers or within a budget each. Return the largest removed score of each layer."""
        return self.mask_set.cut(scores, self.zeros(sparsity, budget))

    def zeros(self, sparsity: float, budget: str = "global") -> list[Zeros]:
        """Return how many weights, blocks or channels a cut removes: for each structure in all, or in each layer."""
        return self.mask_set.zeros(sparsity, self.target, budget, self.values)

    def missing_zeros(self, sparsity: float | None = None, masks: Sequence[Tensor] | None = None) -> list[int]:
        """Return how many weights, blocks or channels must still be removed to reach a sparsity, for each structure.

        Waits for the device. The sparsity is the target unless given; `masks` are those of another state.
        """
        wanted = self.zeros(self.target if sparsity is None else sparsity)
        return [int(zeros) - int(found) for zeros, found in zip(wanted, self.mask_set.zero_units(masks))]  # type: ignore[arg-type]

    def keep_top(self, scores: Sequence[Tensor], zeros: list[Zeros]) -> list[Tensor]:
        """Return masks that remove the smallest of these scores. The weights' own masks do not change."""
        return self.mask_set.top(scores, zeros)

    def keep_above(self, thresholds: Tensor) -> None:
        """Keep the weights whose magnitude exceeds their layer's threshold."""
        self.mask_set.keep_above(self.values, thresholds)

    def exchange(self, share: float, grow_scores: dict[int, Tensor]) -> None:
        """In each layer with `grow_scores`, drop a share of the kept weights and grow as many others.

        Drop the smallest magnitudes; grow the largest `grow_scores`, with a clean optimizer state.
        """
        if grow_scores and share:
            exchange(self.mask_set, share, self.values, grow_scores, self.clear_state)

    def keep_all(self) -> None:
        """Revive every removed weight, with a clean optimizer state."""
        for layer, mask in enumerate(self.masks):
            self.clear_state(layer, ~mask)
        self.mask_set.replace(torch.ones_like(mask) for mask in self.masks)

    def clear_state(self, layer: int, where: Tensor) -> None:
        """Reset the optimizer's state of some weights of a layer."""
        clear_state(self.optimizer, self.parameters[layer], self.groups[layer], where)

    def check(self) -> None:
        """Raise if a parameter was replaced, or if the masks were ranked from NaN. May wait for the GPU to have made them."""
        self.refuse_replaced()
        if self.mask_set.nan_watch.reports:
            self.mask_set.nan_watch.check()
