"""The structure `channel`: how channels are scored, and how many every group keeps."""

import math

import pytest
import torch
from torch import nn

import optg
from tests.toy import attach, convnet

EXAMPLE = torch.zeros(1, 1, 8, 8)


def pool_of(model: nn.Module, sparsity: float = 0.5):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sparsifier = optg.sparsify(model, optimizer, "gmp", sparsity=sparsity, steps=10, structure="channel", example=EXAMPLE)
    return sparsifier, sparsifier.weights.mask_set.pools[0]


def test_the_score_of_a_channel_is_relative_to_its_group_and_ignores_negative_scores():
    sparsifier, pool = pool_of(convnet())
    scores = [torch.zeros_like(value) for value in sparsifier.weights.values]
    place = {name: i for i, name in enumerate(pool.names)}
    scores[place["0.weight"]][0] = 2.0  # 9 weights
    scores[place["0.weight"]][1, 0, 0] = torch.tensor([3.0, -100.0, 3.0])
    scores[place["1.weight"]][:] = 1e6  # norms do not count
    first, second = pool.unit_scores(scores)
    assert first.tolist() == [18 / 3, 6 / 3, *[0.0] * 6]  # the average of the eight channels is 3
    assert second.tolist() == [0.0] * 8  # no division by 0

    scores[place["0.weight"]] *= 1e-20
    assert pool.unit_scores(scores)[0] == pytest.approx(first, rel=1e-9)
    scores[place["4.weight"]][3, 2, 1, 1] = math.nan
    first, second = pool.unit_scores(scores)
    assert second.isnan().all() and not first.isnan().any()


def test_a_channel_that_never_comes_back_ranks_below_one_of_zeros():
    sparsifier, pool = pool_of(convnet())
    scores = [torch.zeros_like(value) for value in sparsifier.weights.values]
    place = {name: i for i, name in enumerate(pool.names)}
    scores[place["0.weight"]][5] = -math.inf  # what methods that never revive weights give removed ones
    scores[place["0.weight"]][6] = 1.0
    first, _ = pool.unit_scores(scores)
    assert first[5] < first[0] == 0 and first[6] == pytest.approx(8)


def test_signed_scores_cancel_in_a_filter_before_batch_norm():
    """Why negative scores are ignored: batch norm does not see the scale of a filter, so g·w sums to 0 over it."""
    conv, norm = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4, eps=1e-12)
    norm(conv(torch.randn(8, 3, 6, 6))).pow(3).sum().backward()
    products = (conv.weight.grad * conv.weight).flatten(1)
    assert (products.sum(1).abs() < 1e-3 * products.abs().sum(1)).all()


def lopsided() -> nn.Module:
    """Return a network whose second layer has one large filter, beside which the other 39 are tiny."""
    layers = nn.Conv2d(1, 40, 3), nn.BatchNorm2d(40), nn.ReLU(), nn.Conv2d(40, 40, 3), nn.BatchNorm2d(40), nn.ReLU()
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(40, 4))
    with torch.no_grad():
        layers[3].weight[7] *= 1e6
    return model


@pytest.mark.parametrize(("sparsity", "floor", "least"), [(0.5, 0.0, 5), (0.6, 0.0, 4), (0.5, 0.3, 12)])
def test_every_group_keeps_a_quarter_of_the_share_that_stays_or_its_floor(sparsity, floor, least):
    options = {"floor": floor} if floor else {}
    _, sparsifier = attach(lopsided(), None, "gmp", sparsity, structure="channel", example=EXAMPLE, **options)
    weights = sparsifier.weights
    weights.cut([value.abs() for value in weights.values], sparsity)
    kept = {name: int(mask.flatten(1).any(1).sum()) for name, mask in sparsifier.masks.items() if mask.ndim > 1}
    assert kept == {"0.weight": 80 - round(80 * sparsity) - least, "3.weight": least}
    assert sparsifier.masks["3.weight"][7].all()
