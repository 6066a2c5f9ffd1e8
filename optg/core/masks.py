"""The one place where masks are made: cuts, exchanges, thresholds and first masks of every method.

Adding a structure (`optg.core.structures`) therefore adds it to all methods.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from optg.core.floors import Floor
from optg.core.layer_kinds import Axes
from optg.core.nan_watch import NanWatch
from optg.core.passes import choose, reference
from optg.core.ranking import Zeros, refuse_nan
from optg.core.sharding import Shards
from optg.core.structures import Unstructured


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
    """The masks of all layers, one tensor each (True: kept), and every way to change them."""

    def __init__(
        self,
        values: list[Tensor],
        names: list[str],
        shapes: list[torch.Size],
        shards: Shards | None,
        structure: Unstructured,
        passes: Any,
    ) -> None:
        self.tensors = [torch.ones_like(v, dtype=torch.bool) for v in values]
        self.counts = torch.zeros(len(names), 3, dtype=torch.int64)  # per layer: zeros, newly removed, revived
        self.names, self.shapes, self.sizes = names, shapes, [shape.numel() for shape in shapes]
        self.shards = shards
        self.structure = structure
        self.passes = passes
        self.floor: Floor | None = None
        self.axes: Sequence[Axes] = []
        self.least = [0] * len(names)  # weights that each layer keeps under the floor
        self.nan_watch = NanWatch()

    def set_floor(self, floor: Floor, axes: Sequence[Axes], target: float) -> None:
        """Protect the largest scores of every group from now on. Raise if that is impossible."""
        floor.refuse(self.names, self.shapes, axes, target, self.shards)
        self.floor, self.axes, self.least = floor, axes, list(map(floor.kept, self.shapes, axes))

    def cut(self, scores: Sequence[Tensor], zeros: Zeros) -> Tensor:
        """Remove the smallest scores. Return the threshold of each layer, its largest removed score."""
        self.nan_watch.reports.clear()  # they concern masks that this cut replaces
        units = self.structure.unit_scores(self.protect(dict(enumerate(scores))))
        cuts = self.passes.select(units, zeros, self.shards)
        self.nan_watch.add(cuts.nan, self.names)
        self.record(self.structure.write(self.passes, self.tensors, units, cuts, self.shards))
        return cuts.values.expand(len(scores))

    def protect(self, scores: dict[int, Tensor]) -> list[Tensor]:
        """Return the scores of some layers, raised to infinity where the floor protects weights."""
        if self.floor is None:
            return list(scores.values())
        return [self.floor.raise_scores(score, self.axes[layer]) for layer, score in scores.items()]

    def show_protected(self, values: list[Tensor], masks: list[Tensor], latent: list[Tensor]) -> None:
        """Show the latent value of kept weights that a soft threshold has made 0: the floor protects them."""
        if self.floor:
            for value, mask, source in zip(values, masks, latent):
                torch.where(mask & (value == 0), source, value, out=value)

    def top(self, scores: dict[int, Tensor], zeros: Zeros, protect: bool = False) -> list[Tensor]:
        """Return masks of some layers that remove the smallest of these scores; the masks in use stay as they are.

        With `protect`, the floor holds in these masks too.
        """
        shards = self.shards and self.shards.of(list(scores))
        units = self.structure.unit_scores(self.protect(scores) if protect else list(scores.values()))
        cuts = self.passes.select(units, zeros, shards)
        self.nan_watch.add(cuts.nan, [self.names[layer] for layer in scores])
        return self.structure.new(self.passes, units, cuts, shards)

    def keep_above(self, values: list[Tensor], thresholds: Tensor) -> None:
        """Keep the weights whose magnitude exceeds their layer's threshold."""
        if self.floor:
            values = self.protect({layer: value.abs() for layer, value in enumerate(values)})
        self.record(self.structure.keep_above(self.passes, self.tensors, values, thresholds))

    def exchange(
        self, share: float, values: list[Tensor], grow_scores: dict[int, Tensor], on_growth: Callable[[int, Tensor], None]
    ) -> None:
        """In each layer with `grow_scores`, drop a share of the kept weights and grow as many others.

        The kept weights of least magnitude go; of the others, those with the largest `grow_scores` come. `on_growth` is
        called with each layer and its grown weights before the masks change.
        """
        layers = list(grow_scores)
        known = torch.tensor([layers, [self.sizes[layer] for layer in layers], [self.least[layer] for layer in layers]])
        index, sizes, least = known.to(self.counts.device, non_blocking=True)
        zeros = self.counts[index, 0]
        moved = (share * (sizes - zeros).double()).long()
        if self.floor:
            moved = moved.minimum(sizes - zeros - least).clamp(min=0)
        magnitudes = {layer: values[layer].abs().where(self.tensors[layer], -1.0) for layer in layers}
        stay = self.top(magnitudes, zeros + moved, protect=True)
        growth = {layer: grow_scores[layer].masked_fill(stays, -1.0) for layer, stays in zip(layers, stay)}
        grown = self.top(growth, sizes - moved)
        new = {layer: stays | grows for layer, stays, grows in zip(layers, stay, grown)}
        for layer, mask in new.items():
            on_growth(layer, mask & ~self.tensors[layer])
        self.replace(new.get(layer, mask) for layer, mask in enumerate(self.tensors))

    def replace(self, masks: Iterable[Tensor]) -> None:
        """Overwrite the masks of all layers."""
        counts = [reference.overwrite(mask, new).to(self.tensors[0].device) for mask, new in zip(self.tensors, masks)]
        self.record(torch.stack(counts))

    def load_counts(self, counts: list[list[int]]) -> None:
        """Set the counts of loaded masks, and forget reports about earlier masks."""
        self.counts = torch.tensor(counts, device=self.counts.device)
        self.nan_watch.reports.clear()

    def record(self, counts: Tensor) -> None:
        """Store the counts of a change. Every change of the masks ends here."""
        self.counts = self.total(counts)

    def count_nonzero(self, values: list[Tensor]) -> Tensor:
        """Return how many values of each layer are not 0."""
        return self.total(torch.stack([value.count_nonzero().to(values[0].device) for value in values]))

    def total(self, values: Tensor) -> Tensor:
        """Sum a value per layer over the ranks that share the layer."""
        return self.shards.total(values) if self.shards else values
