"""The passes of structures as Triton kernels: one launch for all layers of a pool.

Structures that `grid` and `protects` do not describe, float64, and layouts that no kernel knows go to the reference, `units`.
"""

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from optg.core.fixed_point import FixedPoint
from optg.core.layer_kinds import Axes
from optg.core.passes import unit_kernels, units
from optg.core.passes.launch import TYPES, launch
from optg.core.passes.tables import Table, Tables, blocks_of, lines_along

STEP = 1 << 9  # units that a program works on at once: they need many registers
Layers = Sequence[Tensor]


class UnitPasses:
    def __init__(self) -> None:
        self.unit_tables = Tables()
        self.found: dict[Hashable, Any] = {}  # what kernels know about units, by structure and layout

    def describe(self, find: Callable[..., Any], structure: Any, weights: Layers, axes: Sequence[Axes]) -> Any:
        """Return what `find` tells about the units in these layers; None if it does not know them."""
        key = (find, structure, *((w.shape, w.stride(), a) for w, a in zip(weights, axes)))
        if key not in self.found:
            if weights[0].is_cuda and torch.cuda.is_current_stream_capturing():  # a capture may not copy from the host
                return None
            self.found[key] = find(structure, weights, axes)
        return self.found[key]

    def protect(self, structure: Any, scores: Layers, axes: Sequence[Axes]) -> list[Tensor]:
        lines = self.describe(lines_along, structure, scores, axes) if structure.protects else None
        if lines is None or scores[0].dtype not in TYPES:
            return units.protect(structure, scores, axes)
        raised = [torch.empty_like(score) for score in scores]
        if (table := self.unit_tables(scores, raised)) is None:
            return units.protect(structure, scores, axes)
        (n, m), dtype = structure.protects, scores[0].dtype
        launch(unit_kernels.protect, table, lines, torch.finfo(dtype).max, N=n, M=m, TYPE=TYPES[dtype])
        return raised

    def scan(self, values: Layers) -> tuple[Tensor, Tensor]:
        if values[0].dtype not in TYPES or (table := self.unit_tables(values)) is None:
            return units.scan(values)
        found = torch.zeros(len(values) + 1, dtype=torch.int32, device=values[0].device)  # NaN in each layer, then the largest
        launch(unit_kernels.scan, table, found, TYPE=TYPES[values[0].dtype])
        return found[:-1].bool(), found[-1:].view(torch.float32)[0].double()

    def unit_means(
        self, structure: Any, values: Layers, axes: Sequence[Axes], sizes: Layers, fixed: FixedPoint
    ) -> list[Tensor]:
        blocks, sources = self.describe(blocks_of, structure, values, axes), self.unit_tables(values)
        shapes = blocks.shapes if blocks and values[0].dtype in TYPES else []
        means = [torch.empty(shape, dtype=torch.float64, device=values[0].device) for shape in shapes]
        if sources is None or not means or (table := self.unit_tables(means)) is None:
            return units.unit_means(structure, values, axes, sizes, fixed)
        given = sources.addresses, blocks.numbers, fixed.nan.view(torch.int8), fixed.factor, fixed.limit
        launch(unit_kernels.unit_means, table, *given, step=STEP, TYPE=TYPES[values[0].dtype])
        return means

    def write_units(
        self,
        structure: Any,
        masks: Layers,
        kept: Layers,
        axes: Sequence[Axes],
        expand: Callable[[Layers, Layers], list[Tensor]],
    ) -> Tensor:
        blocks = self.describe(blocks_of, structure, masks, axes)
        counts = torch.zeros(len(masks), 3, dtype=torch.int64, device=masks[0].device)
        if blocks is None:  # no kernel knows these units, but one can copy their masks
            new = expand(kept, masks)
            if (table := self.unit_tables(masks, new)) is None:
                return units.write_units(structure, masks, kept, axes, lambda *_: new)
            launch(unit_kernels.overwrite, table, counts)
            return counts
        whole, table = self.unit_tables(masks), self.unit_tables(kept) if all(u.is_contiguous() for u in kept) else None
        if whole is None or table is None:
            return units.write_units(structure, masks, kept, axes, expand)
        launch(unit_kernels.write_units, table, whole.addresses, blocks.numbers, counts, step=STEP)
        return counts

    def ratios(
        self, structure: Any, latent: Layers, masks: Layers, thresholds: Sequence[Tensor], axes: Sequence[Axes]
    ) -> list[Tensor]:
        dtype, blocks = latent[0].dtype, self.describe(blocks_of, structure, latent, axes)
        found = [torch.empty_like(value) for value in latent]
        if blocks is None or dtype not in TYPES or (table := self.unit_tables(latent, masks, found)) is None:
            return units.ratios(structure, latent, masks, thresholds, axes)
        given = blocks.numbers, torch.stack(list(thresholds)), torch.finfo(dtype).max
        constants = {"LARGEST": structure.protects is not None, "TYPE": TYPES[dtype]}
        launch(unit_kernels.ratios, Table(blocks.programs, table.addresses, 1), *given, step=STEP, **constants)
        return found
