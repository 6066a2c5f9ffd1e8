"""The passes as Triton kernels: one launch per pass, whatever the number of layers, and no wait for the GPU.

Lists that a kernel cannot sweep over (mixed types, tensors with gaps in memory) go to the reference.
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch
import triton.language as tl
from torch import Tensor

from optg.core.passes import kernels, reference, update_kernels
from optg.core.passes.fused_units import UnitPasses
from optg.core.passes.launch import TYPES, gpu_of, launch
from optg.core.passes.reference import SoftThreshold
from optg.core.passes.tables import BLOCK, Table, Tables, filters, first_filters, index_maps, output_neurons
from optg.core.ranking import Cuts, Zeros, comparable, flat_scores, radix_select
from optg.core.sharding import Shards

SCORES = {**TYPES, torch.float64: tl.float64}
BITS = 8  # how many bits of a key one round of the selection decides
TIE_BITS = 13  # the same for an index: two rounds decide up to 67M scores
KEEP, DROP = -1, -2  # keep or drop all ties of a layer
SCORE_TABLES = Tables()  # of temporary lists: new scores often have the addresses of the last ones


def count_digits(table: Table, each: bool, prefixes: Tensor, nan: Tensor, first: bool, shift: int, *, width: int) -> Tensor:
    """Count one round of the selection over scores of `width` bits, for each tensor or over all of them."""
    counts = torch.zeros(len(prefixes), 1 << BITS, dtype=torch.int64, device=prefixes.device)
    launch(kernels.count_digits, table, prefixes, counts, nan, shift, EACH=each, FIRST=first, WIDTH=width, BITS=BITS)
    return counts


def narrow(counts: Tensor, prefixes: Tensor, ranks: Tensor) -> Sequence[Tensor]:
    found, digits = torch.empty(3, *prefixes.shape, dtype=torch.int64, device=counts.device), counts.shape[1]
    with gpu_of(counts):
        kernels.narrow[(len(counts),)](counts, prefixes, ranks, found, len(counts), DIGITS=digits, STEP=min(digits, 1024))
    return found.unbind()


def launch_write(
    table: Table, dtype: torch.dtype, thresholds: Tensor, last: Tensor, index: Tensor, magnitudes: bool = False
) -> Tensor:
    """Keep scores above their layer's threshold, and scores equal to it with an index above `last` (KEEP: all, DROP: none).

    `index` comes from `index_maps`; it is not read if all layers drop their ties.
    """
    counts = torch.zeros(table.addresses.shape[1], 3, dtype=torch.int64, device=thresholds.device)
    launch(kernels.write_masks, table, thresholds, last, index, counts, TYPE=SCORES[dtype], MAGNITUDES=magnitudes)
    return counts


class Passes(UnitPasses):
    """The passes of one model, with the tables of its lists. CUDA graphs that were captured with them need them alive."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = Tables()
        self.momenta: dict[float, Tensor] = {}  # momentum coefficients on the device

    def find_table(self, same_type: Sequence[Sequence[Tensor]], *lists: Sequence[Tensor]) -> Table | None:
        """Return the table of the lists; None if the lists in `same_type` do not share a type that the kernels know."""
        if not lists[0] or same_type[0][0].dtype not in TYPES:
            return None
        return self.tables(*lists) if len({tensors[0].dtype for tensors in same_type}) == 1 else None

    def restore(self, values: list[Tensor], masks: list[Tensor], latent: list[Tensor]) -> None:
        if (table := self.find_table([values, latent], values, masks, latent)) is None:
            return reference.restore(values, masks, latent)
        launch(kernels.restore, table, TYPE=TYPES[values[0].dtype])

    def settle(self, values: list[Tensor], masks: list[Tensor], latent: list[Tensor]) -> None:
        if (table := self.find_table([values, latent], values, masks, latent)) is None:
            return reference.settle(values, masks, latent)
        launch(kernels.settle, table, TYPE=TYPES[values[0].dtype])

    def mask(self, targets: list[Tensor], masks: list[Tensor], share: float = 0.0) -> None:
        if (table := self.find_table([targets], targets, masks)) is None:
            return reference.mask(targets, masks, share)
        launch(kernels.mask, table, share, TYPE=TYPES[targets[0].dtype], BLANKS=share == 0)

    def soften(
        self,
        values: list[Tensor],
        masks: list[Tensor],
        latent: list[Tensor],
        effective: Callable[[int, Tensor], Tensor],
        threshold: SoftThreshold | None,
    ) -> None:
        ratios = [threshold.ratios] if threshold and threshold.ratios else []
        table = self.find_table([values, latent, *ratios], values, masks, latent, *ratios) if threshold else None
        rows_first = not (threshold and threshold.rescale) or all(v.stride(0) == v[0].numel() for v in values)
        if threshold is None or threshold.scales is not None or table is None or not rows_first:
            return reference.soften(values, masks, latent, effective, threshold)
        dtype, thresholds = TYPES[values[0].dtype], threshold.thresholds
        factors = sizes = thresholds  # pointers that are not read
        if threshold.rescale:
            shapes = [v.shape for v in values]
            rows, sizes = filters(shapes, thresholds.device), first_filters(shapes, thresholds.device)
            factors = torch.empty(rows.shape[1], dtype=torch.float32, device=thresholds.device)
            launch(kernels.filter_factors, Table(rows, table.addresses, 1), factors, TYPE=dtype)
        constants = {"TYPE": dtype, "RESCALES": threshold.rescale, "RATIOS": bool(ratios)}
        launch(kernels.soften, table, thresholds, threshold.power, factors, sizes, **constants)

    def accumulate(
        self,
        grads: list[Tensor],
        masks: list[Tensor],
        values: list[Tensor],
        momenta: list[Tensor],
        scores: list[Tensor],
        rates: list[Tensor],
        momentum: float,
        skipped: Tensor | None,
    ) -> None:
        table = self.find_table([grads, values], grads, masks, values, momenta, scores)
        if table is None or scores[0].dtype != torch.float32:
            return reference.accumulate(grads, masks, values, momenta, scores, rates, momentum, skipped)
        if momentum not in self.momenta:  # made in an eager step: a capture may not copy from the host
            self.momenta[momentum] = torch.tensor(momentum, dtype=torch.float32, device=scores[0].device)
        inertia = self.momenta[momentum]
        inertia = inertia if skipped is None else torch.where(skipped, 1.0, inertia)
        launch(kernels.accumulate, table, torch.stack(rates), inertia, TYPE=TYPES[values[0].dtype])

    def sum_signed(self, grads: list[Tensor], masks: list[Tensor], values: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
        """Like the reference; the sum is always taken in the same order."""
        if (table := self.find_table([grads, values], grads, masks, values)) is None:
            return reference.sum_signed(grads, masks, values, dtype)
        columns = -(-max(g.numel() for g in grads) // BLOCK)
        sums = torch.zeros(len(grads), columns, device=table.blocks.device)
        launch(kernels.sum_signed, table, sums, columns, TYPE=TYPES[grads[0].dtype])
        return list(sums.sum(1))

    def scale_outputs(self, targets: list[Tensor], factors: list[Tensor]) -> None:
        table, neurons = self.find_table([targets], targets), output_neurons(targets, factors)
        if table is None or neurons is None:
            return reference.scale_outputs(targets, factors)
        launch(update_kernels.scale_outputs, table, neurons, TYPE=TYPES[targets[0].dtype])

    def hyperbolic(
        self, values: list[Tensor], before: list[Tensor], grads: list[Tensor], rates: list[Tensor], alpha: float
    ) -> None:
        if (table := self.find_table([values, before, grads], values, before, grads)) is None:
            return reference.hyperbolic(values, before, grads, rates, alpha)
        launch(update_kernels.hyperbolic, table, torch.stack(rates), alpha, reference.HAM_CLAMP, TYPE=TYPES[values[0].dtype])

    def rescale(
        self,
        values: list[Tensor],
        masks: list[Tensor],
        before: list[Tensor],
        decays: list[Tensor],
        factors: list[Tensor] | None,
        share: float,
        strength: float,
    ) -> None:
        table = self.find_table([values, before], values, masks, before)
        neurons = output_neurons(values, factors) if factors else table and table.blocks  # or a pointer that is not read
        if table is None or neurons is None:
            return reference.rescale(values, masks, before, decays, factors, share, strength)
        numbers = torch.stack(decays), neurons, share, strength, reference.STEP_CLAMP
        launch(
            update_kernels.rescale, table, *numbers, TYPE=TYPES[values[0].dtype], OUTPUTS=factors is not None, HAM=strength != 0
        )

    # ---- a change of the mask

    def select(self, scores: Sequence[Tensor], zeros: Zeros, shards: Shards | None = None) -> Cuts:
        flat, each = flat_scores(comparable(scores), shards), not isinstance(zeros, int)
        if (table := SCORE_TABLES(flat)) is None:
            return reference.select(scores, zeros, shards)
        count = partial(count_digits, table, each, width=flat[0].itemsize * 8)
        return radix_select(flat, [zeros] if isinstance(zeros, int) else zeros, shards, count, narrow, BITS)

    def write_masks(self, masks: list[Tensor], scores: Sequence[Tensor], cuts: Cuts, shards: Shards | None = None) -> Tensor:
        counts = None if shards else self.try_write_masks(masks, scores, cuts)
        return reference.write_masks(masks, scores, cuts, shards) if counts is None else counts

    def new_masks(self, scores: Sequence[Tensor], cuts: Cuts, shards: Shards | None = None) -> list[Tensor]:
        masks = [] if shards else [torch.empty_like(s, dtype=torch.bool) for s in scores]
        done = masks and self.try_write_masks(masks, scores, cuts) is not None
        return masks if done else reference.new_masks(scores, cuts, shards)

    def try_write_masks(self, masks: list[Tensor], scores: Sequence[Tensor], cuts: Cuts) -> Tensor | None:
        """Overwrite the masks and return the counts; None, with nothing written, for layouts that only the reference handles.

        Ties that a cut splits are decided by a second radix selection, on their indices.
        """
        scores, each = comparable(scores), len(cuts.values) > 1
        if (table := self.tables(masks, scores)) is None or (index := index_maps(masks, each)) is None:
            return None
        longest = max(s.numel() for s in scores) if each else sum(s.numel() for s in scores)
        split = cuts.removed < cuts.equal  # only some ties go: those of the lowest indices
        ranks, prefixes = cuts.removed[:, None], torch.zeros_like(cuts.removed)[:, None]
        for shift in range(((longest - 1).bit_length() - 1) // TIE_BITS * TIE_BITS, -1, -TIE_BITS):
            counts = torch.zeros(len(prefixes), 1 << TIE_BITS, dtype=torch.int64, device=prefixes.device)
            given = cuts.values, split.view(torch.int8), index, prefixes, counts, shift
            launch(kernels.count_ties, table, *given, EACH=each, TYPE=SCORES[scores[0].dtype], BITS=TIE_BITS)
            prefixes, ranks, _ = narrow(counts, prefixes, ranks)
        last = torch.where(split, prefixes[:, 0], torch.where(cuts.removed > 0, DROP, KEEP))
        values, last = (t.expand(len(masks)).contiguous() for t in (cuts.values, last))
        return launch_write(table, scores[0].dtype, values, last, index)

    def keep_above(self, masks: list[Tensor], values: list[Tensor], thresholds: Tensor) -> Tensor:
        if (table := self.find_table([values], masks, values)) is None:
            return reference.keep_above(masks, values, thresholds)
        drop = torch.full_like(thresholds, DROP, dtype=torch.int64)
        return launch_write(table, values[0].dtype, thresholds, drop, drop, magnitudes=True)
