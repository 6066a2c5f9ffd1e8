"""Whole programs, cut anywhere and on any number of threads."""

import random
from itertools import product

import pytest
import torch

from tests.deploy.engine.harness import ISAS, RandomTuner, compile_graph, relative_error, small_net


def test_same_bits_for_any_number_of_threads(poisoned: None) -> None:
    graph = small_net()
    for batch in (1, 3, 16, 33):
        x = torch.randn(batch, 3, 11, 11)
        for cut in (0, 2, 6, 10):
            results = []
            for threads in (1, 2, 3, 5, 8):
                RandomTuner.random = random.Random(cut)
                results.append(compile_graph(graph, threads, cut=cut)(x))
            assert all(torch.equal(result, results[0]) for result in results)


@pytest.mark.parametrize("isa", ISAS)
def test_a_net_cut_anywhere(isa: str, poisoned: None) -> None:
    """Groups have as many images as there are lanes, one image, or half as many images, with two lanes each."""
    graph = small_net()
    for batch, cut in product((33, 24, 12, 2), range(11)):
        assert relative_error(graph, 1, isa, torch.randn(batch, 3, 11, 11), cut=cut) < 1e-5, (batch, cut)
