"""The one place where masks are made: cuts, exchanges, thresholds and first masks of every method.

Adding a structure (`optg.core.structures`) therefore adds it to all methods.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from optg.core.floors import Floor
from optg.core.nan_watch import NanWatch
from optg.core.passes import choose, reference
from optg.core.pools import Pool
from optg.core.ranking import Cuts, Zeros, refuse_nan
from optg.core.sharding import Shards


def keep_top(
    scores: Sequence[Tensor], zeros: Zeros, *, shards: Shards | None = None, names: Sequence[str] | None = None
) -> list[Tensor]:
    """Return masks that remove exactly the `zeros` smallest scores of all tensors together, or of each.

    Ties go by index, lowest first. `names` are for the error that NaN raises.

    >>> keep_top([torch.tensor([3.0, 1.0]), torch.tensor([2.0, 2.0])], zeros=2)
    [tensor([ True, False]), tensor([False,  True])]
    """
    passes = choose(scores)
    cuts = passes.select(scores, zeros, shards)
    refuse_nan(cuts.nan, names)
    return passes.new_masks(scores, cuts, shards)


class Masks:
    """The masks of all layers, one tensor each (True: kept), and every way to change them.

    Each pool of layers is ranked on its own. `zeros` in the methods' arguments has one entry per pool.
    """

    def __init__(self, values: list[Tensor], pools: list[Pool], shards: Shards | None, passes: Any) -> None:
        self.tensors = [torch.ones_like(v, dtype=torch.bool) for v in values]
        self.counts = torch.zeros(len(values), 3, dtype=torch.int64)  # per layer: zeros, newly removed, revived
        self.pools, self.shards, self.passes = pools, shards, passes
        self.floor: Floor | None = None
        self.nan_watch = NanWatch()

    def set_floor(self, floor: Floor | None, target: float) -> None:
        """Protect the largest scores of every group from now on. Raise if that is impossible.

        Without a floor, only groups of channels keep a share.
        """
        self.floor = floor
        for pool in self.pools:
            pool.set_floor(floor, target)

    def refuse_target(self, target: float) -> None:
        """Raise if a pool cannot lose as many units as the target asks for."""
        for pool in self.pools:
            wanted, most = pool.zeros(target, target, "global"), sum(pool.most)
            if isinstance(wanted, int) and wanted > most:
                raise ValueError(
                    f"sparsity {target} removes {wanted:,} units of structure '{pool.structure}', but at most {most:,} can go: "
                    "each group of channels keeps some. Use a lower sparsity"
                )

    def zeros(self, sparsity: float, target: float, budget: str, values: Sequence[Tensor]) -> list[Zeros]:
        """Return how many units each pool loses in all, or in each of its layers under a budget."""
        if budget != "magnitude":
            return [pool.zeros(sparsity, target, budget) for pool in self.pools]
        wanted = self.zeros(sparsity, target, "global", values)
        kept = [self.keep_units(pool, units, zeros) for pool, units, zeros in self.each_pool([v.abs() for v in values], wanted)]
        return [self.count_zeros(pool, units) for pool, units in zip(self.pools, kept)]

    def zero_units(self, masks: Sequence[Tensor] | None = None) -> list[Tensor]:
        """Return how many units of each pool are removed, by these masks or by other ones."""
        samples = [pool.sample(self.of(pool, masks or self.tensors)) for pool in self.pools]
        return [self.count_zeros(pool, units).sum() for pool, units in zip(self.pools, samples)]

    # ---- changes of the masks

    def cut(self, scores: Sequence[Tensor], zeros: list[Zeros]) -> Tensor:
        """Remove the smallest scores. Return the threshold of each layer, its largest removed score."""
        self.nan_watch.reports.clear()  # they concern masks that this cut replaces
        changes, thresholds = [], []
        for pool, units, count in self.each_pool(scores, zeros):
            cuts = self.select(pool, units, count)
            masks = self.of(pool, self.tensors)
            if pool.structure.units_are_weights and not any(pool.joined):
                changes.append(self.passes.write_masks(masks, units, cuts, pool.shards))
            else:
                changes.append(pool.write(masks, self.passes.new_masks(units, cuts, pool.shards)))
            thresholds.append(pool.layer_values(cuts.values))
        self.record(self.in_order(changes))
        return self.in_order(thresholds)

    def top(self, scores: Sequence[Tensor], zeros: list[Zeros]) -> list[Tensor]:
        """Return masks that remove the smallest of these scores; the masks in use stay as they are."""
        kept = (self.keep_units(pool, pool.unit_scores(self.of(pool, scores)), n) for pool, n in zip(self.pools, zeros))
        return self.by_layer(pool.expand(units, self.of(pool, self.tensors)) for pool, units in zip(self.pools, kept))

    def keep_above(self, values: list[Tensor], thresholds: Tensor) -> None:
        """Keep the units whose magnitude exceeds their layer's threshold."""
        if not self.floor and all(pool.structure.units_are_weights for pool in self.pools):
            self.record(self.passes.keep_above(self.tensors, values, thresholds))
            return
        new = []
        for pool in self.pools:
            units = pool.protect(pool.unit_scores([v.abs() for v in self.of(pool, values)]))
            above = [unit.to(t.dtype) > t for unit, t in zip(units, self.of(pool, thresholds))]
            new.append(pool.expand(above, self.of(pool, self.tensors)))
        self.replace(self.by_layer(new))

    def replace(self, masks: Iterable[Tensor]) -> None:
        """Overwrite the masks of all layers."""
        counts = [reference.overwrite(mask, new).to(self.tensors[0].device) for mask, new in zip(self.tensors, masks)]
        self.record(torch.stack(counts))

    # ---- the steps of a change

    def each_pool(self, scores: Sequence[Tensor], zeros: Sequence[Zeros]) -> Iterable[tuple[Pool, list[Tensor], Zeros]]:
        """Yield each pool with its units' scores, protected ones at infinity, and the number of units to remove."""
        for pool, count in zip(self.pools, zeros):
            yield pool, pool.protect(pool.unit_scores(self.of(pool, scores))), count

    def select(self, pool: Pool, units: Sequence[Tensor], zeros: Zeros) -> Cuts:
        """Find the threshold that removes so many units of a pool, or so many of each tensor. Refuse NaN."""
        cuts = self.passes.select(units, zeros, pool.shards)
        self.nan_watch.add(cuts.nan, pool.unit_names)
        return cuts

    def keep_units(self, pool: Pool, units: Sequence[Tensor], zeros: Zeros) -> list[Tensor]:
        """Return masks of units that remove the smallest of these scores."""
        return self.passes.new_masks(units, self.select(pool, units, zeros), pool.shards)

    def count_zeros(self, pool: Pool, units: Sequence[Tensor]) -> Tensor:
        """Return how many units of each of a pool's tensors these masks remove."""
        return total(torch.stack([(~unit).count_nonzero().to(self.counts.device) for unit in units]), pool.shards)

    def of(self, pool: Pool, tensors: Any) -> list[Tensor]:
        """Return the tensors of a pool's layers."""
        return [tensors[layer] for layer in pool.layers]

    def by_layer(self, tensors: Iterable[list[Tensor]]) -> list[Tensor]:
        """Return one tensor per layer, given those of each pool's layers."""
        found = {layer: t for pool, mine in zip(self.pools, tensors) for layer, t in zip(pool.layers, mine)}
        return [found[layer] for layer in sorted(found)]

    def in_order(self, values: list[Tensor]) -> Tensor:
        """Return one row per layer, given the rows of each pool's layers."""
        if len(self.pools) == 1:
            return values[0]
        order = torch.tensor([layer for pool in self.pools for layer in pool.layers])
        joined = torch.cat([value.to(values[0].device) for value in values])
        return joined[order.argsort().to(joined.device)]

    # ---- effective weights

    def show_protected(self, values: list[Tensor], masks: list[Tensor], latent: list[Tensor]) -> None:
        """Show the latent value of kept weights that a soft threshold has made 0: the floor protects them."""
        if any(pool.floor for pool in self.pools):
            for value, mask, source in zip(values, masks, latent):
                torch.where(mask & (value == 0), source, value, out=value)

    def ratios(self, latent: Sequence[Tensor], thresholds: Tensor) -> list[Tensor]:
        """Return threshold / magnitude of every weight's unit, for soft thresholds."""
        lists = latent, self.tensors, thresholds
        return self.by_layer(pool.ratios(*(self.of(pool, tensors) for tensors in lists)) for pool in self.pools)

    # ---- counts

    def load_counts(self, counts: list[list[int]]) -> None:
        """Set the counts of loaded masks, and forget reports about earlier masks."""
        self.counts = torch.tensor(counts, device=self.counts.device)
        self.nan_watch.reports.clear()

    def record(self, counts: Tensor) -> None:
        """Store the counts of a change. Every change of the masks ends here."""
        self.counts = total(counts, self.shards)

    def recount(self) -> None:
        """Count the zeros of the masks again: a change that was interrupted left counts of the masks before it."""
        device = self.tensors[0].device
        zeros = self.total(torch.stack([(~mask).count_nonzero().to(device) for mask in self.tensors]))
        self.counts = torch.stack([zeros, *self.counts[:, 1:].to(device).unbind(1)], 1)

    def count_nonzero(self, values: list[Tensor]) -> Tensor:
        """Return how many values of each layer are not 0."""
        return total(torch.stack([value.count_nonzero().to(values[0].device) for value in values]), self.shards)

    def total(self, values: Tensor) -> Tensor:
        """Sum a value per layer over the ranks that share the layer."""
        return total(values, self.shards)


def total(values: Tensor, shards: Shards | None) -> Tensor:
    """Sum a value per tensor over the ranks that share the tensor."""
    return shards.total(values) if shards else values
