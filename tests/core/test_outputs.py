"""SparseOpt's factors: known answers, axes, and when they are renewed."""

import math

import pytest
import torch
from torch import nn

import optg
from optg.core.layer_kinds import Axes
from optg.core.outputs import AliveOutputs, OutputFactors
from optg.core.weights import SparseWeights
from optg.methods import DPF
from tests.toy import batches, convnet, step


def factors_of(mask, axes, kind=OutputFactors):
    p = nn.Parameter(torch.ones(mask.shape))
    weights = SparseWeights({"w": p}, torch.optim.SGD([p], lr=0.1), 0.5, [axes])
    weights.mask_set.replace([mask])
    factors = kind(weights)
    factors.renew()
    return factors.tensors[0]


MASK = torch.tensor([[1, 1, 1, 1], [1, 0, 0, 0], [0, 0, 0, 0]]).bool()  # densities 1, 1/4 and 0; their mean is 5/12
EXPECTED = [math.sqrt(12 / 5), math.sqrt(3 / 5), 1.0]


def test_a_neurons_factor_is_the_root_of_its_relative_density():
    found = factors_of(MASK, Axes())
    assert found.shape == (3, 1) and found.flatten().tolist() == pytest.approx(EXPECTED)


def test_input_first_weights_have_their_outputs_in_the_second_dimension():
    found = factors_of(MASK.T.contiguous(), Axes(output=1, input=0))
    assert found.shape == (1, 3) and found.flatten().tolist() == pytest.approx(EXPECTED)


def test_convolutions_count_whole_filters():
    found = factors_of(MASK.view(3, 1, 2, 2), Axes())
    assert found.shape == (3, 1, 1, 1) and found.flatten().tolist() == pytest.approx(EXPECTED)


def test_each_expert_has_neurons_of_its_own():
    mask = torch.stack([MASK[:2], torch.ones(2, 4, dtype=torch.bool)])  # densities 1, 1/4, 1, 1; their mean is 13/16
    found = factors_of(mask, Axes(output=1, input=2, parts=2))
    assert found.shape == (2, 2, 1)
    assert found.flatten().tolist() == pytest.approx([math.sqrt(d * 16 / 13) for d in (1, 0.25, 1, 1)])


def test_neurons_without_any_weight_are_told_apart():
    assert factors_of(MASK, Axes(), AliveOutputs).flatten().tolist() == [1.0, 1.0, 0.0]
    assert factors_of(MASK.T.contiguous(), Axes(output=1, input=0), AliveOutputs).flatten().tolist() == [1.0, 1.0, 0.0]


@pytest.mark.parametrize("mask", [torch.ones(3, 4), torch.zeros(3, 4)])
def test_a_layer_of_equal_neurons_has_the_factor_1(mask):
    assert torch.equal(factors_of(mask.bool(), Axes()), torch.ones(3, 1))


def test_the_factors_follow_the_masks_in_place():
    torch.manual_seed(0)
    model = convnet()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sparsifier = optg.sparsify(model, optimizer, DPF(every=3, end=1.0, sparse_opt=True), sparsity=0.9, steps=12)
    factors = sparsifier._step.updates.outputs
    places = [f.data_ptr() for f in factors.tensors]
    changes = 0
    for batch in batches(12):
        before = [f.clone() for f in factors.tensors]
        step(model, optimizer, batch)
        changes += not all(map(torch.equal, before, factors.tensors))
        expected = OutputFactors(sparsifier.weights)
        expected.renew()
        assert all(map(torch.equal, factors.tensors, expected.tensors))
    assert changes == 4 and places == [f.data_ptr() for f in factors.tensors]
