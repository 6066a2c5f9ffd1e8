"""The FLOPs of a whole training, if a machine could skip every zero.

An image costs f in forward, f in backward for activations, and f for the gradients of weights, where f are the FLOPs of the
sparse model. The third is dense in steps in which the method reads the gradients of removed weights.
"""

from typing import Any

from optg.core.accounting import Account
from optg.core.clock import Clock
from optg.methods import Method


def training_flops(
    account: Account, method: Method, clock: Clock, rows: list[dict[str, Any]], batch_size: int, frozen_from: int | None = None
) -> int:
    """Sum over the epochs of a run. `rows` are its metrics; each has the zeros of every layer at the end of its epoch.

    Args:
        frozen_from: the step from which on the masks are frozen, so that no step reads the gradients of removed weights.
    """
    positions = {layer.name: layer.positions for layer in account.layers}
    total = done = 0
    for row in rows:
        sparse = account.dense_flops - sum(counts[0] * positions.get(name, 0) for name, counts in row["layers"].items())
        steps = range(done, row["step"])
        dense_gradients = sum(
            method.reads_removed(clock.at(step)) for step in steps if frozen_from is None or step < frozen_from
        )
        total += batch_size * (3 * sparse * len(steps) + (account.dense_flops - sparse) * dense_gradients)
        done = row["step"]
    return total
