"""The weights of a convolution in the order in which the kernel for pixels reads them, for 16 filters at a time.

A block is 64 neighbouring channels at one tap. A pick chooses 4 weights for each of the 16 filters from two successive blocks;
picks come in twos. The blocks of a group are read in order: the picks from blocks i and i + 1 take all weights of block i that
are left, and as many of block i + 1 as there is room for. So a filter with many weights in one block catches up in the next
one, while others take weights in advance. Few places are left empty.
"""

from typing import NamedTuple

import numpy as np

FILTERS, BLOCK, PICK, TWO = 16, 64, 4, 2


class Picks(NamedTuple):
    table: np.ndarray  # picks × (64 indices, 64 weights)
    blocks: np.ndarray  # for every second pick, two blocks: tap · blocks per tap + block
    counts: np.ndarray  # picks of each group


class Schedule(NamedTuple):
    """What is taken from every block and the next one."""

    picks: np.ndarray  # groups × blocks
    taken: np.ndarray  # weights of each filter: groups × filters × blocks


def block_weights(weight: np.ndarray) -> np.ndarray:
    """Return weights (filters × channels × kernel) as groups × filters × blocks × channels, filled up with zeros."""
    filters, channels = weight.shape[:2]
    groups, per_tap = -(-filters // FILTERS), -(-channels // BLOCK)
    taps = weight.reshape(filters, channels, -1).transpose(0, 2, 1)
    padded = np.zeros((groups * FILTERS, taps.shape[1], per_tap * BLOCK), np.int8)
    padded[:filters, :, :channels] = taps
    return padded.reshape(groups, FILTERS, -1, BLOCK)


def schedule(blocks: np.ndarray) -> Schedule:
    """Decide how many picks each block gets."""
    counts = np.count_nonzero(blocks, axis=3)
    picks, taken = np.zeros((len(counts), counts.shape[2]), np.int64), np.zeros(counts.shape, np.int64)
    ahead = np.zeros(counts.shape[:2], np.int64)  # weights of this block that are already taken
    after = np.pad(counts, ((0, 0), (0, 0), (0, 1)))[:, :, 1:]
    for block in range(counts.shape[2]):
        left = counts[:, :, block] - ahead
        picks[:, block] = -(-left.max(axis=1) // (PICK * TWO)) * TWO
        ahead = np.minimum(PICK * picks[:, block, None] - left, after[:, :, block])
        taken[:, :, block] = left + ahead
    return Schedule(picks, taken)


def make_picks(blocks: np.ndarray, plan: Schedule) -> Picks:
    """Return the picks for weights: groups × filters × blocks × channels."""
    count = blocks.shape[2]
    length = plan.picks.ravel()
    start = np.cumsum(length) - length
    listed = np.repeat(np.arange(len(length)) % count, length // TWO)[:, None] + np.arange(TWO)

    table = np.zeros((int(length.sum()), 2, FILTERS * PICK), np.uint8)
    g, f, b, channel = np.unravel_index(np.flatnonzero(blocks), blocks.shape)  # faster than np.nonzero
    taken = plan.taken.ravel()
    number = np.arange(len(g)) - np.repeat(np.cumsum(taken) - taken, taken)  # of each weight in its filter's picks
    first = np.repeat(np.arange(len(taken)) % count, taken)  # the first block of those
    row, lane = start[g * count + first] + number // PICK, f * PICK + number % PICK
    table[row, 0, lane] = channel + BLOCK * (b - first)
    table[row, 1, lane] = blocks[g, f, b, channel].view(np.uint8)
    return Picks(table, np.minimum(listed, count - 1).astype(np.int32), plan.picks.sum(axis=1))
