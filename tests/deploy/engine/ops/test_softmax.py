"""Softmax over the channels against torch."""

import pytest

from tests.deploy.engine.harness import ISAS, check_ops

SOFTMAXES = [("softmax.int", (1,)), ("_softmax", (-3, False))]


@pytest.mark.parametrize("isa", ISAS)
def test_softmax(isa: str, poisoned: None) -> None:
    check_ops(SOFTMAXES, isa)
