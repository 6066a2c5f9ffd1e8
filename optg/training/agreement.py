"""Keep processes that train together in agreement: on their masks, and on when to save and stop."""

import time

import torch
from torch import Tensor

from optg.sparsifier import Sparsifier
from optg.training.errors import MasksDiffer
from optg.training.parallel import Parallel

VOTE_SECONDS = 1.0  # approximate time between votes
MAX_VOTE_STEPS = 100  # at most this many steps between votes


class MaskCheck:
    """Verify after every cut that all processes have the same masks.

    Processes compare a fingerprint of each layer's mask. Under FSDP2 each process holds a different piece of a mask; there the
    zeros of all pieces must add up to the number that the cut made.
    """

    def __init__(self, sparsifier: Sparsifier, parallel: Parallel) -> None:
        self.sparsifier, self.parallel = sparsifier, parallel
        self.checked: Tensor | None = None  # counts of the last cut that was checked

    def check(self) -> None:
        """Raise MasksDiffer if masks were cut since the last call and now differ between processes."""
        weights = self.sparsifier.weights
        if self.parallel.world == 1 or weights.counts is self.checked:
            return
        self.checked = weights.counts
        sharded = weights.shards.pieces if weights.shards else [False] * len(weights.names)
        marks = [(~m).count_nonzero() if piece else fingerprint(m) for m, piece in zip(weights.masks, sharded)]
        by_layer, zeros = self.parallel.gather(torch.stack(marks)).T.tolist(), weights.counts[:, 0].tolist()
        for name, piece, found, expected in zip(weights.names, sharded, by_layer, zeros):
            if piece and sum(found) != expected:
                raise self.error(name, f"has {sum(found)} zeros over all ranks, but the cut made {expected}")
            if not piece and (odd := [rank for rank, mark in enumerate(found) if mark != found[0]]):
                raise self.error(name, f"on rank {odd[0]} differs from the one on rank 0")

    def error(self, layer: str, problem: str) -> MasksDiffer:
        step = self.sparsifier.clock.step
        advice = "Give the same command to continue from the last checkpoint; if this happens again, please report it"
        return MasksDiffer(f"step {step}: the mask of {layer} {problem}. {advice}")


def fingerprint(mask: Tensor) -> Tensor:
    """Return a 64-bit hash of a mask: the sum, modulo 2⁶⁴, of a mixed index for every kept weight."""
    index = torch.arange(1, mask.numel() + 1, device=mask.device)
    index.mul_(-7046029254386353131).bitwise_xor_(index >> 29)  # mixed, so that sums of different index sets rarely collide
    index.mul_(-4658895280553007687).bitwise_xor_(index >> 32)
    return index.mul_(mask.reshape(-1)).sum()


class Vote:
    """Tell all processes, at the same step, whether any of them raised a flag.

    A vote makes everyone wait for the slowest process, so it is held about once a second. All processes agree on the number of
    steps until the next one, from the longest time that any of them measured.
    """

    def __init__(self, parallel: Parallel) -> None:
        self.parallel = parallel
        self.interval = self.steps_left = 1
        self.since = time.monotonic()

    def __call__(self, *flags: bool) -> list[bool]:
        """Return for each flag whether any process raised it; all False between votes."""
        if self.parallel.world == 1:
            return list(flags)
        self.steps_left -= 1
        if self.steps_left:
            return [False] * len(flags)
        *raised, seconds = self.parallel.max(*map(float, flags), time.monotonic() - self.since)
        self.interval = max(1, min(MAX_VOTE_STEPS, int(VOTE_SECONDS * self.interval / max(seconds, 1e-6))))
        self.steps_left, self.since = self.interval, time.monotonic()
        return [flag > 0 for flag in raised]
