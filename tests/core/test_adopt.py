"""`optg.masks_from` takes over masks of torch.nn.utils.prune and plain zeros."""

import copy
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

import optg
from tests.toy import batches, convnet, sgd, step


def prune_globally(model: nn.Sequential) -> None:
    layers = [(model[0], "weight"), (model[4], "weight"), (model[7], "weight")]
    prune.global_unstructured(layers, prune.L1Unstructured, amount=0.8)


def prune_with_a_custom_mask(model: nn.Sequential) -> None:
    prune.custom_from_mask(model[4], "weight", torch.arange(576).view(8, 8, 3, 3) % 3 == 0)


def prune_twice(model: nn.Sequential) -> None:
    prune.l1_unstructured(model[7], "weight", amount=0.5)
    prune.ln_structured(model[7], "weight", amount=3, n=2, dim=0)


PRUNINGS: dict[str, Callable[[nn.Sequential], object]] = {
    "magnitude": lambda model: prune.l1_unstructured(model[4], "weight", amount=0.7),
    "random": lambda model: prune.random_unstructured(model[7], "weight", amount=100),
    "channels": lambda model: prune.ln_structured(model[4], "weight", amount=0.5, n=2, dim=0),
    "global": prune_globally,
    "custom": prune_with_a_custom_mask,
    "twice": prune_twice,
}


@pytest.mark.parametrize("pruning", PRUNINGS)
def test_masks_become_plain_zeros_that_keep_keeps(pruning: str) -> None:
    torch.manual_seed(0)
    model = convnet()
    names, shapes = [*model.state_dict()], {name: p.shape for name, p in model.named_parameters()}
    PRUNINGS[pruning](model)
    expected = {name.removesuffix("_mask"): mask.bool() for name, mask in model.named_buffers() if name.endswith("_mask")}
    optimizer = sgd(model.parameters())  # made before: it must stay usable
    x = batches(1)[0][0]
    before = model.eval()(x)

    masks = optg.masks_from(model)

    assert sorted(model.state_dict()) == sorted(names)
    assert {name: p.shape for name, p in model.named_parameters()} == shapes
    assert not prune.is_pruned(model) and torch.equal(model(x), before)
    assert masks.keys() == expected.keys() and all(torch.equal(masks[name], expected[name]) for name in masks)
    model.train()
    with warnings.catch_warnings(action="error"):
        sparsifier = optg.sparsify(model, optimizer, method="keep")
        for batch in batches(5):
            step(model, optimizer, batch)
        sparsifier.finish()
    for name, mask in masks.items():
        assert torch.equal(model.get_parameter(name) != 0, mask)
    assert not torch.equal(model.eval()(x), before)


def test_zeros_of_any_source_count() -> None:
    model = convnet()
    with torch.no_grad():
        model[4].weight[2:5] = 0.0
        model[7].weight[0, :3] = -0.0
    copied = copy.deepcopy(model)
    masks = optg.masks_from(model)
    assert [*masks] == ["4.weight", "7.weight"]
    assert masks["4.weight"].sum() == 5 * 72 and masks["7.weight"][0, :3].sum() == 0
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), copied.parameters()))


def test_masks_that_were_removed_before_are_found_as_zeros() -> None:
    model = convnet()
    prune.l1_unstructured(model[4], "weight", amount=0.5)
    prune.remove(model[4], "weight")
    assert [(name, int((~mask).sum())) for name, mask in optg.masks_from(model).items()] == [("4.weight", 288)]
    assert optg.masks_from(convnet()) == {}


def test_recurrent_weights() -> None:
    torch.manual_seed(0)
    model = nn.ModuleDict({"rnn": nn.LSTM(6, 5, num_layers=2)})
    x = torch.randn(3, 2, 6)
    for name in ("weight_ih_l0", "weight_hh_l1"):
        prune.l1_unstructured(model["rnn"], name, amount=0.6)
    before = model["rnn"](x)[0]
    masks = optg.masks_from(model)
    assert {name: int((~mask).sum()) for name, mask in masks.items()} == {"rnn.weight_ih_l0": 72, "rnn.weight_hh_l1": 60}
    assert torch.equal(model["rnn"](x)[0], before)
    with torch.no_grad():
        model["rnn"].weight_ih_l0.zero_()
    assert not torch.equal(model["rnn"](x)[0], before), "the layer still computes with its old weights"


def test_a_wrapped_model_and_names_without_the_wrapper() -> None:
    model = convnet()
    prune.l1_unstructured(model[0], "weight", amount=0.5)
    assert [*optg.masks_from(nn.DataParallel(model))] == ["0.weight"]


def test_a_masked_bias_is_freed_with_a_warning() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    with torch.no_grad():
        model[0].bias.copy_(torch.arange(1.0, 5.0))
    prune.l1_unstructured(model[0], "bias", amount=2)
    with pytest.warns(UserWarning, match="0.bias had a mask, but optg prunes weights only"):
        assert optg.masks_from(model) == {}
    assert model[0].bias.tolist() == [0, 0, 3, 4]
