"""Structures: which weights are removed together. Every mask is made through one of these classes.

A structure turns the scores of weights into the scores of *units*, and a cut of units into masks of weights. A unit of the
`unstructured` structure is a single weight.
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from optg.core.ranking import Cuts, zeros_at
from optg.core.sharding import Shards


class Unstructured:
    """Single weights."""

    def zeros(self, sparsity: float, size: int) -> int:
        """Return how many of `size` units a cut to this sparsity removes."""
        return zeros_at(sparsity, size)

    def unit_scores(self, scores: Sequence[Tensor]) -> Sequence[Tensor]:
        """Return one score per unit."""
        return scores

    def write(self, passes: Any, masks: Sequence[Tensor], units: Sequence[Tensor], cuts: Cuts, shards: Shards | None) -> Tensor:
        """Overwrite the masks by a cut of the units. Return how many weights are zero, newly removed and revived, per layer."""
        return passes.write_masks(masks, units, cuts, shards)

    def new(self, passes: Any, units: Sequence[Tensor], cuts: Cuts, shards: Shards | None) -> list[Tensor]:
        """Return new masks from a cut of the units."""
        return passes.new_masks(units, cuts, shards)

    def keep_above(self, passes: Any, masks: Sequence[Tensor], values: Sequence[Tensor], thresholds: Tensor) -> Tensor:
        """Overwrite the masks to keep units whose magnitude exceeds their layer's threshold. Return counts as `write` does."""
        return passes.keep_above(masks, values, thresholds)


STRUCTURES = {"unstructured": Unstructured()}
