"""Rice coding: exact, and close to the entropy."""

import math

import numpy as np
import pytest

from optg.deploy.packed.rice import best_rice_parameter, decode_rice, encode_rice


@pytest.mark.parametrize("density", [1e-4, 0.02, 0.1, 0.5, 0.95])
def test_mask_takes_little_more_than_its_entropy(density: float) -> None:
    size = 400_000
    kept = np.random.RandomState(0).rand(size) < density
    gaps = np.diff(np.flatnonzero(kept), prepend=-1) - 1
    quotients, remainders = encode_rice(gaps, best_rice_parameter(gaps))
    entropy = -size * (density * math.log2(density) + (1 - density) * math.log2(1 - density))
    bits = 8 * (len(quotients) + len(remainders))
    assert bits < 1.06 * entropy + 100 or bits <= size + 8  # a dense mask becomes the plain bitmap


@pytest.mark.parametrize("gaps", [[], [0], [5], [0, 0, 0, 0, 0, 0, 0, 0, 0], [1000, 0, 1], [2**20, 2**31, 7]])
@pytest.mark.parametrize("k", [0, 1, 3, 13, 31])
def test_rice_code_round_trips(gaps: list[int], k: int) -> None:
    if sum(gap >> k for gap in gaps) > 2**21:
        pytest.skip("a code of gigabytes")
    quotients, remainders = encode_rice(np.array(gaps, np.int64), k)
    found = decode_rice("t", len(gaps), k, memoryview(quotients), memoryview(remainders))
    assert found.tolist() == [sum(gaps[: i + 1]) + i for i in range(len(gaps))]


def test_rice_code_of_a_literal_example() -> None:
    quotients, remainders = encode_rice(np.array([5, 0, 2, 9]), 2)  # 5 = 1·4 + 1, 0, 2, 9 = 2·4 + 1
    assert np.unpackbits(np.frombuffer(quotients, np.uint8)).tolist() == [0, 1, 1, 1, 0, 0, 1, 0]
    assert np.unpackbits(np.frombuffer(remainders, np.uint8)).tolist() == [0, 1, 0, 0, 1, 0, 0, 1]
