"""What processes that train together must agree on: that their masks are the same, and when to save and stop."""

import time

import torch
from torch import Tensor

from optg.sparsifier import Sparsifier
from optg.training.parallel import Parallel

SECONDS = 1.0  # between two votes, about
MOST = 100  # steps


class Disagreement(Exception):
    """The masks of two processes differ."""


class SameMasks:
    """Compares a fingerprint of every layer's mask over the processes, whenever masks were cut.

    Under FSDP2 a process has a piece of a mask that no other has. There the removed weights of all pieces are counted: they
    must be as many as the cut says.
    """

    def __init__(self, sparsifier: Sparsifier, parallel: Parallel) -> None:
        self.sparsifier, self.parallel = sparsifier, parallel
        self.checked: Tensor | None = None  # the counts of the cut that was compared last

    def check(self) -> None:
        weights = self.sparsifier.weights
        if self.parallel.world == 1 or weights.counts is self.checked:
            return
        self.checked = weights.counts
        split = weights.shards.pieces if weights.shards else [False] * len(weights.names)
        marks = [(~m).count_nonzero() if piece else fingerprint(m) for m, piece in zip(weights.masks, split)]
        table, counts = self.parallel.gather(torch.stack(marks)), weights.counts[:, 0].tolist()
        for name, piece, found, zeros in zip(weights.names, split, table.T.tolist(), counts):
            if piece and sum(found) != zeros:
                raise Disagreement(self.text(name, f"has {sum(found)} zeros over all ranks, where the cut made {zeros}"))
            if not piece and (odd := [rank for rank, mark in enumerate(found) if mark != found[0]]):
                raise Disagreement(self.text(name, f"on rank {odd[0]} is not that of rank 0"))

    def text(self, layer: str, what: str) -> str:
        step = self.sparsifier.clock.step
        return f"step {step}: the mask of {layer} {what}. Go on from the last checkpoint; if it happens again, tell us"


def fingerprint(mask: Tensor) -> Tensor:
    """64 bits that tell masks of one shape apart: the sum of a number for each place that is kept, modulo 2⁶⁴."""
    place = torch.arange(1, mask.numel() + 1, device=mask.device)
    place.mul_(-7046029254386353131).bitwise_xor_(place >> 29)  # mixed, or places would add up to those of others
    place.mul_(-4658895280553007687).bitwise_xor_(place >> 32)
    return place.mul_(mask.reshape(-1)).sum()


class Votes:
    """Does any process say so? A vote makes all wait for the slowest, so they vote about once a second.

    How many steps that is they agree on as well: from the longest time that one of them took.
    """

    def __init__(self, parallel: Parallel) -> None:
        self.parallel, self.steps, self.left, self.since = parallel, 1, 1, time.monotonic()

    def __call__(self, *flags: bool) -> list[bool]:
        if self.parallel.world == 1:
            return list(flags)
        self.left -= 1
        if self.left:
            return [False] * len(flags)
        *found, seconds = self.parallel.most(*map(float, flags), time.monotonic() - self.since)
        self.steps = self.left = max(1, min(MOST, int(SECONDS * self.steps / max(seconds, 1e-6))))
        self.since = time.monotonic()
        return [flag > 0 for flag in found]
