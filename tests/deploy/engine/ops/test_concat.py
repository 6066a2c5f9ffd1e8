"""Concatenation against torch."""

import pytest

from optg.deploy.graph import Node, Ref
from tests.deploy.engine.harness import ISAS, check_two_inputs


@pytest.mark.parametrize("isa", ISAS)
def test_concatenation(isa: str, poisoned: None) -> None:
    check_two_inputs([Node("n", "aten.cat.default", ([Ref("x"), Ref("y"), Ref("x")], 1))], isa)
