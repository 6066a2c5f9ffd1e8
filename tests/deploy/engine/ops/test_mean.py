"""Means over height and width against torch."""

import pytest

from tests.deploy.engine.harness import ISAS, check_ops

MEANS = [("mean.dim", ([2, 3], True)), ("mean.dim", ([-1, -2],))]


@pytest.mark.parametrize("isa", ISAS)
def test_means(isa: str, poisoned: None) -> None:
    check_ops(MEANS, isa)
