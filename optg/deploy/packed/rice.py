"""Rice coding of a mask: the number of zeros before each value.

A gap g = q·2ᵏ + r is written as q zero bits and a one (the quotient), and r in k bits (the remainder). All quotients come
first, then all remainders. At 98 % zeros a value takes 7.1 bits, within 1 % of the entropy. With k = 0 the code is the plain
bitmap.
"""

import numpy as np

from optg.deploy.packed.checks import require

LARGEST_K = 31


def gaps_before(kept: np.ndarray) -> np.ndarray:
    """Return the number of zeros before each kept element of a mask."""
    return np.diff(np.flatnonzero(kept), prepend=-1) - 1


def best_rice_parameter(gaps: np.ndarray) -> int:
    """Return the k with the shortest code. As k grows, the length first falls and then rises."""

    def bits(k: int) -> int:
        return int((gaps >> k).sum()) + len(gaps) * (k + 1)

    k = 0
    while k < LARGEST_K and bits(k + 1) < bits(k):
        k += 1
    return k


def encode_rice(gaps: np.ndarray, k: int) -> tuple[bytes, bytes]:
    """Return the quotients and the remainders of gaps ≥ 0 as packed bits."""
    ones = np.cumsum((gaps >> k) + 1) - 1
    unary = np.zeros(int(ones[-1]) + 1 if len(ones) else 0, np.uint8)
    unary[ones] = 1
    remainders = (gaps[:, None] >> np.arange(k)[::-1]) & 1
    return np.packbits(unary).tobytes(), np.packbits(remainders.astype(np.uint8)).tobytes()


def decode_rice(name: str, count: int, k: int, quotients: memoryview, remainders: memoryview) -> np.ndarray:
    """Return the positions of the values, in increasing order. `name` is the tensor's, for error messages."""
    ones = np.flatnonzero(np.unpackbits(np.frombuffer(quotients, np.uint8)))
    require(len(ones) == count, f"tensor {name}: the mask has {len(ones)} positions for {count} values")
    require(len(quotients) == (int(ones[-1]) // 8 + 1 if count else 0), f"tensor {name}: unexpected bytes after the mask")
    gaps = (np.diff(ones, prepend=-1) - 1) << k
    if k:
        bits = np.unpackbits(np.frombuffer(remainders, np.uint8), count=count * k).reshape(count, k)
        for bit in range(k):
            gaps += bits[:, bit].astype(np.int64) << (k - 1 - bit)
    return np.cumsum(gaps + 1) - 1
