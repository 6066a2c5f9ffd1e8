"""Check that the model is as sparse as its masks say, and make it so."""

import warnings
from dataclasses import dataclass

import torch

from optg.core.weights import SparseWeights


@dataclass(frozen=True)
class Verification:
    """The result of `sparsifier.verify()`. A mismatch is a non-zero weight that the mask removes."""

    mismatches: dict[str, int]  # by layer; layers without one are not listed
    zeros: int  # removed weights, over all layers

    @property
    def ok(self) -> bool:
        return not self.mismatches

    def __str__(self) -> str:
        if self.ok:
            return f"all {self.zeros:,} removed weights are 0"
        where = ", ".join(f"{name}: {count:,}" for name, count in list(self.mismatches.items())[:3])
        more = f" and {len(self.mismatches) - 3} more layers" if len(self.mismatches) > 3 else ""
        return f"{sum(self.mismatches.values()):,} of {self.zeros:,} removed weights are not 0 ({where}{more})"


def verify(weights: SparseWeights) -> Verification:
    """Compare the parameters with the masks. Waits once for the device."""
    pairs = zip(weights.values, weights.masks)
    found = torch.stack([value.masked_fill(mask, 0).count_nonzero().to(weights.devices[0]) for value, mask in pairs])
    removed = weights.counts[:, 0].to(found.device)
    counts, zeros = torch.stack([weights.mask_set.total(found), removed]).tolist()
    return Verification({name: count for name, count in zip(weights.names, counts) if count}, sum(zeros))


def remove_again(weights: SparseWeights, stacklevel: int) -> bool:
    """Zero removed weights that other code has written to, with a warning. Return whether there were any."""
    found = verify(weights)
    if found.ok:
        return False
    weights.passes.mask(weights.values, weights.masks)
    warnings.warn(
        f"{found}: something has written to the model since the last step (EMA, SWA, loading the best checkpoint, an optimizer "
        "with two sets of weights). They are removed again, so measure the model's accuracy again",
        stacklevel=stacklevel,
    )
    return True


def refuse_nonfinite(weights: SparseWeights) -> None:
    """Raise if a weight is NaN or infinite. Waits once for the device."""
    # A sum with such a term is not finite either, and takes a fortieth of the time. Only a sum that overflows needs more.
    sums = torch.stack([value.sum(dtype=weights.state_dtype).to(weights.devices[0]) for value in weights.values])
    finite = zip(sums.isfinite().tolist(), weights.values)
    found = [int(not (sure or value.isfinite().all())) for sure, value in finite]
    if weights.shards:  # all ranks raise together
        found = weights.mask_set.total(torch.tensor(found, device=weights.devices[0])).tolist()
    broken = [name for name, count in zip(weights.names, found) if count]
    if broken:
        more = " …" if len(broken) > 3 else ""
        raise FloatingPointError(
            f"NaN or infinite weights in {', '.join(broken[:3])}{more}: training has diverged. Go back to an earlier "
            "checkpoint, and lower the learning rate or clip gradients"
        )
