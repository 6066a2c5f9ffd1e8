"""Models of other packages fit into the short list of operations and its limits."""

import pytest
import torch

from optg.deploy.graph import capture
from optg.deploy.packed import About, pack, unpack
from tests.integrations.test_timm_models import MODELS, create

NOT_EXPORTED = {"efficientvit_b0": "a submodule as a value", "sequencer2d_s": "aten.lstm.input"}
UNUSUAL = ("edgenext_xx_small", "convit_tiny")  # they compute positions with rare operations


def check_round_trip(name: str) -> None:
    model, x = create(name, MODELS[name]).eval(), torch.randn(2, 3, MODELS[name], MODELS[name])
    loaded = unpack(pack(capture(model, x[:1]), About(name, 4, tuple(x.shape[1:]))))
    with torch.no_grad():
        expected, got = model(x), loaded(x)
    assert torch.allclose(*(v[0] if isinstance(v, tuple) else v for v in (expected, got)), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", UNUSUAL)
def test_unusual_model_fits(name: str) -> None:
    check_round_trip(name)


@pytest.mark.long
@pytest.mark.parametrize("name", [name for name in MODELS if name not in UNUSUAL])
def test_model_fits(name: str) -> None:
    if name in NOT_EXPORTED:
        with pytest.raises(ValueError, match=NOT_EXPORTED[name]):
            check_round_trip(name)
    else:
        check_round_trip(name)
