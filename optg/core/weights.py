"""The prunable weights of a model as parallel lists: what forward sees, what the optimizer moves, and the masks between.

Between steps a Parameter holds the *effective* weight: its value where the mask is True, 0.0 where it is not. A kept weight
lives in the Parameter alone, so whatever others write there counts. The *latent* value of a removed weight, where the
method keeps it, waits in `latent` and stands in the Parameter only while the optimizer steps.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from optg.core.budgets import layer_zeros
from optg.core.passes import find_kernels
from optg.core.ranking import Zeros, each_mask, masks_of, recut, refuse_nan, select, zeros_at
from optg.core.sharding import Shards, find_shards, is_dtensor, local_piece, to_local, with_layout_of


class Soft(NamedTuple):
    """A power threshold (`optg.methods.feather`): one for each layer, and whether filters make up for it (`st3`)."""

    thresholds: Tensor
    power: float
    rescales: bool = False


class SparseWeights:
    """Names, parameters, masks and latent values, entry i of each list being about layer i.

    Every tensor in the lists is the local one; under FSDP2 that is this process's piece of the layer.
    """

    def __init__(self, parameters: dict[str, nn.Parameter], optimizer: torch.optim.Optimizer, target: float) -> None:
        self.names = list(parameters)
        self.parameters = list(parameters.values())
        self._values: list[Tensor] = []
        self.optimizer = optimizer
        self.target = target  # the sparsity to arrive at
        self.shards = find_shards(parameters)
        self.shapes = [p.shape for p in self.parameters]
        self.size = sum(shape.numel() for shape in self.shapes)
        self.masks = [torch.ones_like(v, dtype=torch.bool) for v in self.values]
        self.latent: list[Tensor] | None = None  # of removed weights; under `reshape`, of all
        self.reshape: Callable[[SparseWeights, int, Tensor], Tensor] | None = None  # latent -> effective, beyond the mask
        self.soft: Callable[[], Soft | None] | None = None  # what it depends on, where it is the power threshold
        self.skipped: Tensor | None = None  # set where a GradScaler may skip this step: True, on the device, if it does
        self.counts = torch.zeros(len(self.names), 3, dtype=torch.int64)  # of each layer: zeros, removed, revived
        self.watched: list[tuple[Tensor, torch.cuda.Event, list[str]]] = []  # which layers had NaN, when it has arrived
        groups = optimizer.param_groups
        owner = {p: i for i, group in enumerate(groups) for p in group["params"]}
        self.groups = [owner[p] for p in self.parameters]  # the parameter group of each
        self.devices = [v.device for v in self.values]
        self.state_dtype = torch.promote_types(max((v.dtype for v in self.values), key=lambda d: d.itemsize), torch.float32)
        kernels: Any = find_kernels(self.values)
        one_type = len(dtypes := {v.dtype for v in self.values}) == 1
        self.kernels: Any = kernels if kernels and one_type and dtypes <= set(kernels.TYPES) else None
        self.tables = self.kernels.Tables() if self.kernels else None

    # ---- what the lists hold

    @property
    def values(self) -> list[Tensor]:
        """What the parameters hold now: effective weights between steps, latent ones inside a step."""
        known = self._values
        if not known or any(v.data_ptr() != p.data_ptr() for v, p in zip(known, self.parameters)):
            values = [to_local(p).detach() for p in self.parameters]
            self._values = [] if any(is_dtensor(p) for p in self.parameters) else values
            return values
        return known

    def table(self, *lists: Sequence[Tensor]) -> Any:
        """Where a Triton kernel finds the tensors of parallel lists; None where they are for torch's own operations."""
        return self.tables(*lists) if self.tables else None

    @property
    def grads(self) -> dict[int, Tensor]:
        """The gradients, by layer; a layer that took no part in the last backward has none."""
        return {i: to_local(p.grad) for i, p in enumerate(self.parameters) if p.grad is not None}

    def zeros_like(self) -> list[Tensor]:
        """A new state of at least float32 for every weight: many small steps add up in it."""
        return [torch.zeros_like(v, dtype=torch.promote_types(v.dtype, torch.float32)) for v in self.values]

    def random(self, seed: int) -> list[Tensor]:
        """A uniform number for every weight, the same whatever the device and however the layers are split."""
        generator = torch.Generator().manual_seed(seed)
        whole = (torch.rand(shape, generator=generator) for shape in self.shapes)
        return [with_layout_of(p, local_piece(p, number).to(to_local(p).device)) for p, number in zip(self.parameters, whole)]

    @property
    def sparsity(self) -> float:
        return int(self.counts[:, 0].sum()) / self.size  # a sync

    # ---- showing one or the other in the parameters

    def show_latent(self) -> None:
        """Parameters <- latent: kept values are there already, removed ones come back."""
        if self.latent is None:
            return
        values = self.values
        if values[0].dtype != self.latent[0].dtype:  # the model was moved to another since
            self.latent = [latent.to(value.dtype) for latent, value in zip(self.latent, values)]
        if self.reshape is not None:
            torch._foreach_copy_(values, self.latent)
        elif (table := self.table(values, self.masks, self.latent)) is not None:
            self.kernels.restore(table, values[0].dtype)
        else:
            for mask, value, latent in zip(self.masks, values, self.latent):
                torch.where(mask, value, latent, out=value)

    def show_effective(self) -> None:
        """Parameters <- effective: removed values become 0.0, whatever they were (NaN too)."""
        values = self.values
        if self.latent is not None and self.reshape is not None:
            soft, table = self.soft() if self.soft else None, self.table(values, self.masks, self.latent)
            if soft and table and (not soft.rescales or all(v.stride(0) == v[0].numel() for v in values)):
                shapes = [v.shape for v in values] if soft.rescales else ()
                self.kernels.soften(table, values[0].dtype, soft.thresholds, soft.power, shapes)
                return
            for layer, (value, latent) in enumerate(zip(values, self.latent)):
                value.copy_(self.reshape(self, layer, latent))
        self.fade(values, self.masks)

    def settle(self) -> None:
        """Latent <- parameters, parameters <- effective: when the optimizer has stepped and the mask is that of now."""
        values = self.values
        plain = self.latent is not None and self.reshape is None
        if plain and (table := self.table(values, self.masks, self.latent or [])) is not None:
            self.kernels.settle(table, values[0].dtype)
        else:
            self.store_latent()
            self.show_effective()

    def store_latent(self) -> None:
        """Latent <- parameters, as they are."""
        if self.latent is not None:
            torch._foreach_copy_(self.latent, self.values)

    def route_gradients(self, dormant: float) -> None:
        """Kept weights receive their gradient, removed ones `dormant` times theirs."""
        if dormant != 1:
            grads = self.grads
            self.fade(list(grads.values()), [self.masks[layer] for layer in grads], dormant)

    def sum_signed_gradients(self) -> Tensor:
        """Of each layer Σ g · sign(w) over the kept weights, which alone are left with a gradient."""
        grads, values = self.grads, self.values
        layers, given = list(grads), list(grads.values())
        masks, weights = [self.masks[i] for i in layers], [values[i] for i in layers]
        sums = torch.zeros(len(self.names), dtype=self.state_dtype, device=self.devices[0])
        table = self.table(given, masks, weights) if layers and given[0].dtype == weights[0].dtype else None
        if table is not None:
            found = self.kernels.sum_signed(table, given[0].dtype, max(g.numel() for g in given))
            torch._foreach_copy_([sums[i] for i in layers], list(found))
        elif layers:
            self.fade(given, masks)
            for i, product in zip(layers, torch._foreach_mul(torch._foreach_sign(weights), given)):
                sums[i] = product.sum(dtype=sums.dtype)
        return self.total(sums)

    def fade(self, targets: list[Tensor], masks: list[Tensor], share: float = 0.0) -> None:
        """Leave removed entries with a share of what they were."""
        if not targets:
            return
        if (table := self.table(targets, masks)) is not None:
            self.kernels.fade(table, targets[0].dtype, share)
            return
        for mask, target in zip(masks, targets):
            if share == 0:
                blank(mask, target)
            else:
                torch.where(mask, target, target * share, out=target)

    # ---- new masks

    def cut(self, scores: Sequence[Tensor], sparsity: float, budget: str = "global") -> Tensor:
        """Keep the largest scores: over all layers together, or in each layer as many as its budget says.

        Returns the threshold of each layer, its largest removed score.
        """
        self.watched.clear()  # of masks that go now
        zeros = zeros_at(sparsity, self.size) if budget == "global" else self.budget(budget, sparsity)
        cuts = select(scores, zeros, self.shards)
        self.watch(cuts.nan, self.names)
        counts = None if self.shards else recut(self.masks, scores, cuts, self.tables)
        if counts is None:
            self.replace_masks(each_mask(scores, cuts, self.shards))
        else:
            self.counts = counts
        return cuts.values.expand(len(scores))

    def keep_top(self, scores: dict[int, Tensor], zeros: Zeros) -> list[Tensor]:
        """New masks of some layers: the largest scores of all together, but for `zeros` of them, or of each."""
        shards = self.shards and Shards(self.shards.group, tuple(self.shards.pieces[layer] for layer in scores))
        cuts = select(list(scores.values()), zeros, shards)
        self.watch(cuts.nan, [self.names[layer] for layer in scores])
        return masks_of(list(scores.values()), cuts, shards)

    def watch(self, nan: Tensor, names: list[str]) -> None:
        """Refuse scores that had NaN: at once, or where that would be to wait for a GPU, at the next `check`."""
        if not nan.is_cuda:
            refuse_nan(nan, names)
            return
        found, arrived = torch.empty_like(nan, device="cpu", pin_memory=True), torch.cuda.Event()
        found.copy_(nan, non_blocking=True)
        arrived.record(torch.cuda.current_stream(nan.device))
        self.watched.append((found, arrived, names))

    def check(self) -> None:
        """Raise if the last masks were made of NaN. Waits until the GPU has made them, and not for its work since then."""
        if not self.watched or torch.cuda.is_current_stream_capturing():  # under capture nothing may wait; a replay follows
            return
        for found, arrived, names in self.watched:
            arrived.synchronize()
            refuse_nan(found, names)
        self.watched.clear()

    def keep_above(self, thresholds: Tensor) -> None:
        """Keep the weights whose magnitudes are above their layer's threshold."""
        values = self.values
        if (table := self.table(self.masks, values)) is None:
            self.replace_masks(value.abs().to(self.state_dtype) > t for value, t in zip(values, thresholds))
        else:
            drop = torch.full_like(thresholds, self.kernels.DROP, dtype=torch.int64)
            counts = self.kernels.recut(table, values[0].dtype, thresholds, drop, magnitudes=True)
            self.counts = self.total(counts)

    def budget(self, name: str, sparsity: float) -> list[int] | Tensor:
        """How many weights each layer loses under a named budget."""
        if name != "magnitude":
            return layer_zeros(name, self.shapes, sparsity)
        masks = self.keep_top({i: v.abs() for i, v in enumerate(self.values)}, zeros_at(sparsity, self.size))
        return self.total(torch.stack([(~mask).count_nonzero() for mask in masks]))

    def total(self, values: Tensor) -> Tensor:
        """The sum over ranks of a value for each layer, where layers are split; else the values themselves."""
        return self.shards.total(values) if self.shards else values

    def replace_masks(self, masks: Iterable[Tensor]) -> None:
        """Take over new masks, counting what each layer loses and gets back."""
        counts = []
        for mask, new in zip(self.masks, masks):
            before, both = mask.count_nonzero(), (mask & new).count_nonzero()
            after = mask.copy_(new).count_nonzero()
            counts.append(torch.stack([mask.numel() - after, before - both, after - both]).to(self.masks[0].device))
        self.counts = self.total(torch.stack(counts))

    def open(self) -> None:
        """Keep every weight; those that come back do so with a clean optimizer state."""
        for layer, mask in enumerate(self.masks):
            self.clear_state(layer, ~mask)
        self.replace_masks(torch.ones_like(mask) for mask in self.masks)

    def exchange(self, share: float, grow_scores: dict[int, Tensor]) -> None:
        """In each layer, drop the share of its kept weights that are least in magnitude, and grow as many that are not kept
        where `grow_scores` are largest, with a clean optimizer state. A layer with no such score stays as it is."""
        if not grow_scores or not share:
            return
        masks, values, layers = self.masks, self.values, list(grow_scores)
        known = torch.tensor([layers, [self.shapes[layer].numel() for layer in layers]])
        index, sizes = known.to(self.counts.device, non_blocking=True)
        zeros = self.counts[index, 0]
        moved = (share * (sizes - zeros).double()).long()
        magnitudes = {layer: values[layer].abs().where(masks[layer], -1.0) for layer in layers}
        stay = self.keep_top(magnitudes, zeros + moved)
        growth = {layer: grow_scores[layer].masked_fill(stays, -1.0) for layer, stays in zip(layers, stay)}
        grown = self.keep_top(growth, sizes - moved)
        new = {layer: stays | grows for layer, stays, grows in zip(layers, stay, grown)}
        for layer, mask in new.items():
            self.clear_state(layer, mask & ~masks[layer])
        self.replace_masks(new.get(layer, mask) for layer, mask in enumerate(masks))

    def clear_state(self, layer: int, where: Tensor) -> None:
        """Forget the optimizer's state (momentum, Adam's moments) of some weights of a layer."""
        parameter, group = self.parameters[layer], self.optimizer.param_groups[self.groups[layer]]
        clean = {"step_size": group["lr"], "sum": group.get("initial_accumulator_value", 0.0)}  # Rprop's and Adagrad's
        for name, state in self.optimizer.state.get(parameter, {}).items():
            if isinstance(state, Tensor) and state.shape == parameter.shape:
                to_local(state).masked_fill_(where, clean.get(name, 0.0))


def blank(mask: Tensor, value: Tensor) -> None:
    """0.0 where the mask is False. A product would leave −0.0, and NaN of what is infinite."""
    torch.where(mask, value, value.new_zeros(()), out=value)
