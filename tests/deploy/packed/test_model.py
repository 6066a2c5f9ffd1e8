"""The module that `optg.load` returns."""

import copy
from pathlib import Path

import pytest
import torch
from torch import nn

import optg
from optg.deploy.graph import GraphError, capture
from optg.deploy.packed import PackedModel, write_packed
from tests.deploy.packed.examples import ABOUT


def test_loaded_model_is_a_module(tmp_path: Path) -> None:
    net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3))
    write_packed(tmp_path / "m.optg", capture(net, torch.zeros(1, 1, 6, 6)), ABOUT)
    loaded, images = optg.load(str(tmp_path / "m.optg")), torch.randn(2, 1, 6, 6)
    assert not loaded.training and isinstance(loaded, PackedModel)
    loaded(images).sum().backward()
    assert loaded.get_parameter("0.weight").grad is not None
    loaded.load_state_dict({name: value + 1 for name, value in net.state_dict().items()})
    net.load_state_dict(loaded.state_dict())
    assert torch.equal(loaded(images), net(images))  # it computes with its parameters as they are now
    assert torch.equal(copy.deepcopy(loaded).double()(images.double()), net.double()(images.double()))
    assert torch.equal(loaded.graph.tensors["3.bias"], net[3].bias.float())
    with pytest.raises(GraphError, match="expected any×1×6×6"):
        loaded(torch.randn(2, 1, 7, 7))
