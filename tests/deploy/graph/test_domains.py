"""Domains of arguments: what each accepts, and the errors."""

import math

import pytest
import torch

from optg.deploy.graph import GraphError
from optg.deploy.graph.domains import MOST_PIECES, check_arguments, domain

X = torch.empty(2, 3, 8, 8, device="meta")
INTS, BOOLS = X.to(torch.int64), X.to(torch.bool)


@pytest.mark.parametrize(
    ("name", "accepted", "refused"),
    [
        ("float", [X, X.half(), X.double()], [INTS, BOOLS, X.to(torch.complex64), 1.0, None, X[(None,) * 5]]),
        ("real", [X, INTS, BOOLS], [X.to(torch.float8_e5m2), INTS.to(torch.uint16), "x"]),
        ("index", [INTS, INTS.int()], [X, BOOLS, INTS.short(), 3]),
        ("mask", [BOOLS], [INTS, True]),
        ("operand", [X, 1, 2.0, True], [None, "1", torch.float32]),
        ("number", [0, -1.5, math.inf, True], [None, X, 1j]),
        ("zero", [0, 0.0], [0.1, False, None]),
        ("no", [False], [True, 0, None]),
        ("count", [1, 2**16], [0, -1, 2**16 + 1, 1.0, True]),
        ("dim", [-8, 0, 7], [-9, 8, 0.0, X]),
        ("dims", [3, [], [0, 1], (-1,)], [[8], [0] * 9, [0.0], None]),
        ("steps", [1, [2, 4096]], [0, [], [1, 0], [4097], [1, 1, 1], X]),
        ("padding", [0, [0, 256]], [-1, [257], []]),
        ("extents", [[-1, 0, 2**31]], [[-2], [2**31 + 1], [X]]),
        ("position", [0, 2**63 - 1, -(2**62)], [-(2**63), 0.5]),
        ("scales", [[0.5, 64.0]], [[0.0], [1e9], [math.nan], [2], []]),
        ("edge", ["constant", "reflect"], ["circular", None, 1]),
        ("equation", ["ij,jk->ik", "b h i -> b"], ["i...->i", "ij,jk", "", "i->" + 100 * "i"]),
        ("dtype", [torch.float32, torch.bool], [torch.complex64, torch.quint8, 6, None]),
        ("float?", [None, X], [INTS]),
        ("real*", [[X], (X, INTS)], [X, [], [None], [X] * (MOST_PIECES + 1)]),
        ("index?*", [[None, INTS]], [[BOOLS], None]),
    ],
)  # fmt: skip
def test_domain_accepts(name: str, accepted: list[object], refused: list[object]) -> None:
    for value in accepted:
        assert domain(name).accepts(value), value
    for value in refused:
        assert not domain(name).accepts(value), value


@pytest.mark.parametrize(
    ("op", "args", "kwargs", "message"),
    [
        ("aten.adaptive_avg_pool2d.default", (X, [0, 0]), {}, "output_size is [0, 0]; expected 1 to 2 values, each an integer"),
        ("aten.conv2d.default", (X, X, None, [0, 0]), {}, "stride is [0, 0]; expected"),
        ("aten.div.Tensor_mode", (INTS, INTS), {"rounding_mode": "floor"}, "self is a 4-dimensional tensor of torch.int64"),
        ("aten.div.Tensor_mode", (X, X), {"rounding_mode": "trunc"}, "rounding_mode is 'trunc'; expected 'floor'"),
        ("aten.index.Tensor", (X, [BOOLS]), {}, "expected 1 to 1024 values, each None, or a tensor of int32 or int64"),
        ("aten.relu.default", (X,), {"inplace": True}, "the argument 'inplace' is not permitted"),
        ("aten.relu.default", (X, X), {}, "got 2 arguments; expected at most 1"),
        ("aten.batch_norm.default", (X, None, None, X, X, True, 0.1, 1e-5, False), {}, "change the running statistics"),
        ("aten.expand.default", (X[0, 0, 0, 0], [-1, 0]), {}, "size is [-1, 0]; expected no -1 for a new"),
        ("aten.expand.default", (X[0, 0, 0],), {"size": [2, -1, 8]}, "size is [2, -1, 8]; expected no -1"),
        ("aten.unbind.int", (torch.empty(2000, 2, device="meta"),), {}, "splits a tensor into 2,000 pieces"),
        ("aten.split.Tensor", (torch.empty(2, 9999, device="meta"), 3, 1), {}, "splits a tensor into 3,333 pieces"),
        ("aten.chunk.default", (X, 2000), {}, "splits a tensor into 2,000 pieces"),
        ("aten.scaled_dot_product_attention.default", (X, X[:, :0], X), {"enable_gqa": True}, "query, key or value is empty"),
        ("operator.mul", (1, 2, 3), {}, "at most two arguments"),
    ],
)  # fmt: skip
def test_argument_out_of_its_domain_is_refused(
    op: str, args: tuple[object, ...], kwargs: dict[str, object], message: str
) -> None:
    with pytest.raises(GraphError) as caught:
        check_arguments(op, args, kwargs)
    assert message in str(caught.value)


def test_arguments_are_returned_by_name() -> None:
    assert check_arguments("aten.flatten.using_ints", (X, 1), {"end_dim": -1}) == {"self": X, "start_dim": 1, "end_dim": -1}
    assert check_arguments("operator.mul", (1, 2), {}) == {}
