"""Reshapes against torch."""

import pytest

from tests.deploy.engine.harness import ISAS, check_ops

RESHAPES = [("flatten.using_ints", (1,))]


@pytest.mark.parametrize("isa", ISAS)
def test_reshapes(isa: str, poisoned: None) -> None:
    check_ops(RESHAPES, isa)
