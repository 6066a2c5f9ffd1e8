"""Tensors in a packed file: every dtype, shape and value round-trips bit for bit."""

import math

import pytest
import torch
from torch import Tensor

from optg.deploy.graph import DTYPES
from optg.deploy.packed import Values, pack, unpack
from optg.deploy.packed.tensors import same_bits
from tests.deploy.packed.examples import ABOUT, graph_with


def round_trip(tensor: Tensor, values: Values = "float32") -> Tensor:
    return unpack(pack(graph_with(t=tensor), ABOUT, values)).graph.tensors["t"]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("density", [0.0, 0.01, 0.3, 1.0])
def test_every_dtype_round_trips_bit_for_bit(dtype: str, density: float) -> None:
    random = torch.Generator().manual_seed(0)
    kind = DTYPES[dtype]
    raw = torch.randint(256, (5, 7, 11, kind.itemsize), generator=random, dtype=torch.uint8)
    if kind == torch.bool:
        raw = raw % 2
    raw *= (torch.rand(5, 7, 11, 1, generator=random) < density).to(torch.uint8)
    tensor = raw.view(kind).squeeze(-1)  # arbitrary bits: NaNs with payloads, infinities, subnormals
    found = round_trip(tensor)
    assert found.shape == (5, 7, 11) and found.dtype == kind and same_bits(found, tensor)


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1,), (2, 3), (1, 1, 1, 1, 1)])
def test_every_shape_round_trips(shape: tuple[int, ...]) -> None:
    for tensor in (torch.zeros(shape), torch.ones(shape), torch.randn(shape)):
        assert same_bits(round_trip(tensor), tensor)


def test_negative_zero_nan_and_infinity_are_kept() -> None:
    tensor = torch.zeros(1000)
    tensor[[3, 500, 999]] = torch.tensor([-0.0, math.nan, -math.inf])
    found = round_trip(tensor)
    assert same_bits(found, tensor) and found[3].signbit() and found[500].isnan()


def test_strided_shared_and_channels_last_tensors_round_trip() -> None:
    base = torch.randn(8, 3, 4, 4)
    for tensor in (
        base.to(memory_format=torch.channels_last),
        base[::2, :, 1:],
        base[:1].expand(8, 3, 4, 4),
        base.transpose(0, 1),
    ):
        assert torch.equal(round_trip(tensor), tensor)


def test_bfloat16_rounds_like_torch_and_only_rounds_weights() -> None:
    weight = torch.randn(64, 64) * (torch.rand(64, 64) < 0.1)
    weight[0, 0], weight[0, 1], weight[1, 1] = 1e-45, -0.0, 3e38
    assert same_bits(round_trip(weight, "bfloat16"), weight.bfloat16().float())
    assert same_bits(round_trip(torch.randn(64), "bfloat16"), (bias := torch.randn(64))) is False and same_bits(
        round_trip(bias, "bfloat16"), bias
    )
    half = torch.randn(4, 4).half()
    assert same_bits(round_trip(half, "bfloat16"), half)
    graph = graph_with(t=weight)
    graph.kinds["t"] = "buffer"
    assert same_bits(unpack(pack(graph, ABOUT, "bfloat16")).graph.tensors["t"], weight)
