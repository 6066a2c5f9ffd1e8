"""The prunable weights of a model as parallel lists: effective weights, latent weights and the masks between them.

Between steps a Parameter holds the *effective* weight: its value if the mask keeps it, 0.0 if not. A kept weight lives in the
Parameter alone, so whatever others write there counts. The *latent* value of a dormant weight, for methods that keep it, is
stored in `latent`; it is in the Parameter only while the optimizer steps.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from optg.core.budgets import layer_zeros
from optg.core.layer_kinds import Axes
from optg.core.masks import Masks
from optg.core.optimizer_state import clear_state
from optg.core.passes import choose
from optg.core.passes.reference import SoftThreshold
from optg.core.ranking import Zeros
from optg.core.sharding import find_shards, is_dtensor, local_piece, to_local, with_layout_of
from optg.core.structures import STRUCTURES


class SparseWeights:
    """Names, parameters, masks and latent weights; entry i of each list belongs to layer i.

    Every tensor in the lists is local: with FSDP2 it is this process's piece of the layer.
    """

    def __init__(
        self,
        parameters: dict[str, nn.Parameter],
        optimizer: torch.optim.Optimizer,
        target: float,
        axes: list[Axes] | None = None,
    ) -> None:
        self.names = list(parameters)
        self.axes = axes or [Axes()] * len(parameters)
        self.parameters = list(parameters.values())
        self.optimizer = optimizer
        self.target = target  # the sparsity at the end of training
        self.shapes = [p.shape for p in self.parameters]
        self.size = sum(shape.numel() for shape in self.shapes)
        self.shards = find_shards(parameters)
        self._distributed = any(is_dtensor(p) for p in self.parameters)
        self._values: list[Tensor] = []
        self.devices = [v.device for v in self.values]
        self.state_dtype = torch.promote_types(max((v.dtype for v in self.values), key=lambda d: d.itemsize), torch.float32)
        owner = {p: i for i, group in enumerate(optimizer.param_groups) for p in group["params"]}
        self.groups = [owner[p] for p in self.parameters]  # the parameter group of each layer
        self.passes = choose(self.values)
        self.structure = STRUCTURES["unstructured"]
        self.mask_set = Masks(self.values, self.names, self.shapes, self.shards, self.structure, self.passes)
        self.latent: list[Tensor] | None = None  # of dormant weights; of all weights if `effective` is set
        self.effective: Callable[[int, Tensor], Tensor] | None = None  # (layer, latent) -> effective, before the mask
        self.soft_threshold: Callable[[], SoftThreshold | None] = lambda: None  # the same function, if it is a soft threshold
        self.skipped: Tensor | None = None  # set if a GradScaler may skip this step: True, on the device, if it does
        self._lr: dict[tuple[int, torch.device], Tensor] = {}

    # ---- the lists

    @property
    def values(self) -> list[Tensor]:
        """The parameters' values: effective weights between steps, latent weights inside a step."""
        known = self._values
        if not known or any(v.data_ptr() != p.data_ptr() for v, p in zip(known, self.parameters)):
            values = [to_local(p).detach() for p in self.parameters]
            self._values = [] if self._distributed else values
            return values
        return known

    @property
    def masks(self) -> list[Tensor]:
        return self.mask_set.tensors

    @property
    def counts(self) -> Tensor:
        """Per layer: zeros, and the weights that the last change of the mask removed and revived. A new tensor per change."""
        return self.mask_set.counts

    @property
    def grads(self) -> dict[int, Tensor]:
        """Gradients by layer. A layer that took no part in the last backward pass has none."""
        grads = {i: p.grad for i, p in enumerate(self.parameters) if p.grad is not None}
        return {i: to_local(grad) for i, grad in grads.items()} if self._distributed else grads

    @property
    def sparsity(self) -> float:
        """The share of weights that the masks remove. Waits for the device."""
        return int(self.counts[:, 0].sum()) / self.size

    def learning_rates(self) -> list[Tensor]:
        """Return the learning rate of each layer as a scalar tensor on its device; 0 if this step is skipped."""
        rates = {}
        for key in dict.fromkeys(zip(self.groups, self.devices)):
            group, device = key
            lr = self.optimizer.param_groups[group]["lr"]
            if not isinstance(lr, Tensor):
                if key not in self._lr:
                    self._lr[key] = torch.zeros((), dtype=self.state_dtype, device=device)
                lr = self._lr[key].fill_(lr)
            lr = lr.reshape(()).to(device)
            rates[key] = lr if self.skipped is None else lr.masked_fill(self.skipped.to(device), 0.0)
        return [rates[key] for key in zip(self.groups, self.devices)]

    def group_option(self, name: str, default: float) -> list[float]:
        """Return an option of each layer's parameter group, such as `weight_decay`."""
        return [self.optimizer.param_groups[group].get(name, default) for group in self.groups]

    def unless_skipped(self, value: Any, otherwise: Any) -> Any:
        """Return `value`; if a GradScaler may skip this step, a tensor that is `otherwise` if it does."""
        return value if self.skipped is None else torch.where(self.skipped, otherwise, value)

    def zeros_like(self) -> list[Tensor]:
        """Return zeros for every weight, in float32 at least: many small steps add up in them."""
        return [torch.zeros_like(v, dtype=torch.promote_types(v.dtype, torch.float32)) for v in self.values]

    def random(self, seed: int) -> list[Tensor]:
        """Return a uniform random number for every weight, the same on any device and however the layers are split."""
        generator = torch.Generator().manual_seed(seed)
        whole = (torch.rand(shape, generator=generator) for shape in self.shapes)
        return [with_layout_of(p, local_piece(p, number).to(to_local(p).device)) for p, number in zip(self.parameters, whole)]

    # ---- effective and latent weights in the parameters

    def show_latent(self) -> None:
        """Set the parameters to the latent weights."""
        if self.latent is None:
            return
        values = self.values
        if values[0].dtype != self.latent[0].dtype:  # the model has been converted since
            self.latent = [latent.to(value.dtype) for latent, value in zip(self.latent, values)]
        if self.effective is None:
            self.passes.restore(values, self.masks, self.latent)
        else:
            torch._foreach_copy_(values, self.latent)

    def show_effective(self) -> None:
        """Set the parameters to the effective weights. Removed weights become 0.0, whatever they were (NaN too)."""
        if self.latent is None or self.effective is None:
            self.passes.mask(self.values, self.masks)
        else:
            self.passes.soften(self.values, self.masks, self.latent, self.effective, self.soft_threshold())
            self.mask_set.show_protected(self.values, self.latent)

    def settle(self) -> None:
        """Store the latent weights that the optimizer left in the parameters, then show the effective ones."""
        if self.latent is not None and self.effective is None:
            self.passes.settle(self.values, self.masks, self.latent)
        else:
            self.store_latent()
            self.show_effective()

    def store_latent(self) -> None:
        """Copy the parameters to `latent`."""
        if self.latent is not None:
            torch._foreach_copy_(self.latent, self.values)

    # ---- gradients

    def mask_gradients(self, share: float = 0.0, masks: Sequence[Tensor] | None = None) -> None:
        """Leave removed weights, or those that other masks remove, with a share of their gradient."""
        grads, masks = self.grads, masks or self.masks
        if grads and share != 1:
            self.passes.mask(list(grads.values()), [masks[layer] for layer in grads], share)

    def sum_signed_gradients(self) -> Tensor:
        """Zero the gradients of removed weights, then return Σ g · sign(w) of each layer."""
        sums = torch.zeros(len(self.names), dtype=self.state_dtype, device=self.devices[0])
        if grads := self.grads:
            masks, values = [self.masks[i] for i in grads], [self.values[i] for i in grads]
            found = self.passes.sum_signed(list(grads.values()), masks, values, sums.dtype)
            torch._foreach_copy_([sums[i] for i in grads], found)
        return self.mask_set.total(sums)

    # ---- new masks

    def cut(self, scores: Sequence[Tensor], sparsity: float, budget: str = "global") -> Tensor:
        """Keep the largest scores, of all layers or within a budget each. Return the largest removed score of each layer."""
        return self.mask_set.cut(scores, self.zeros(sparsity, budget))

    def zeros(self, sparsity: float, budget: str = "global") -> Zeros:
        """Return how many weights a cut removes in all, or how many each layer loses under its budget."""
        if budget == "global":
            return self.structure.zeros(sparsity, self.size)
        if budget != "magnitude":
            return layer_zeros(budget, self.shapes, sparsity, self.mask_set.least)
        magnitudes = {i: v.abs() for i, v in enumerate(self.values)}
        masks = self.mask_set.top(magnitudes, self.structure.zeros(sparsity, self.size), protect=True)
        return self.mask_set.total(torch.stack([(~mask).count_nonzero() for mask in masks]))

    def keep_top(self, scores: dict[int, Tensor], zeros: Zeros) -> list[Tensor]:
        """Return masks of some layers that remove the smallest of these scores. The weights' own masks stay as they are."""
        return self.mask_set.top(scores, zeros)

    def keep_above(self, thresholds: Tensor) -> None:
        """Keep the weights whose magnitude exceeds their layer's threshold."""
        self.mask_set.keep_above(self.values, thresholds)

    def exchange(self, share: float, grow_scores: dict[int, Tensor]) -> None:
        """In each layer with `grow_scores`, drop a share of the kept weights and grow as many others.

        The kept weights of least magnitude go; those with the largest `grow_scores` come, with a clean optimizer state.
        """
        if not grow_scores or not share:
            return
        new = self.mask_set.exchanged(share, self.values, grow_scores)
        for layer, mask in new.items():
            clear_state(self.optimizer, self.parameters[layer], mask & ~self.masks[layer])
        self.mask_set.replace(new.get(layer, mask) for layer, mask in enumerate(self.masks))

    def keep_all(self) -> None:
        """Revive every removed weight, with a clean optimizer state."""
        for layer, mask in enumerate(self.masks):
            clear_state(self.optimizer, self.parameters[layer], ~mask)
        self.mask_set.replace(torch.ones_like(mask) for mask in self.masks)

    def check(self) -> None:
        """Raise if the masks were ranked from NaN. May wait for the GPU to have made them."""
        if self.mask_set.nan_watch.reports:
            self.mask_set.nan_watch.check()
