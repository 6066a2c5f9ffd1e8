"""The weights of a convolution in the order in which the kernel for pixels reads them, for 16 filters at a time.

A block is 64 neighbouring channels at one tap. A pick chooses 4 of them for each of the 16 filters. A block has as many picks
as its fullest filter needs, at most 4: a fuller block is there several times.
"""

from typing import NamedTuple

import numpy as np

FILTERS, BLOCK, PICK, MOST_PICKS = 16, 64, 4, 4


class Picks(NamedTuple):
    table: np.ndarray  # picks × (64 indices, 64 weights)
    blocks: np.ndarray  # the block of each run of picks: tap · blocks per tap + block
    counts: np.ndarray  # groups × MOST_PICKS: runs of 1, 2, 3 and 4 picks, in this order


def block_weights(weight: np.ndarray) -> np.ndarray:
    """Return weights (filters × channels × kernel) as groups × filters × blocks × channels, filled up with zeros."""
    filters, channels = weight.shape[:2]
    groups, per_tap = -(-filters // FILTERS), -(-channels // BLOCK)
    taps = weight.reshape(filters, channels, -1).transpose(0, 2, 1)
    padded = np.zeros((groups * FILTERS, taps.shape[1], per_tap * BLOCK), np.int8)
    padded[:filters, :, :channels] = taps
    return padded.reshape(groups, FILTERS, -1, BLOCK)


def count_picks(blocks: np.ndarray) -> np.ndarray:
    """Return how many picks each block needs: groups × blocks."""
    return -(-np.count_nonzero(blocks, axis=3).max(axis=1) // PICK)


def make_picks(blocks: np.ndarray) -> Picks:
    """Return the picks for weights: groups × filters × blocks × channels."""
    needed = count_picks(blocks)
    group, block, part = np.nonzero(np.arange(-(-needed.max(initial=0) // MOST_PICKS)) * MOST_PICKS < needed[..., None])
    length = np.minimum(needed[group, block] - part * MOST_PICKS, MOST_PICKS)
    order = np.lexsort((part, block, length, group))
    first = np.zeros((*needed.shape, part.max(initial=0) + 1), np.int64)  # the first pick of each run
    first[group[order], block[order], part[order]] = np.cumsum(length[order]) - length[order]
    counts = np.zeros((len(blocks), MOST_PICKS), np.int64)
    np.add.at(counts, (group, length - 1), 1)

    table = np.zeros((int(length.sum()), 2, FILTERS * PICK), np.uint8)
    g, f, b, channel = np.nonzero(blocks)
    number = np.cumsum(blocks != 0, axis=3)[g, f, b, channel] - 1  # of each weight in its filter's block
    pick = number // PICK
    row = first[g, b, pick // MOST_PICKS] + pick % MOST_PICKS
    lane = f * PICK + number % PICK
    table[row, 0, lane], table[row, 1, lane] = channel, blocks[g, f, b, channel].view(np.uint8)
    return Picks(table, block[order].astype(np.int32), counts)
