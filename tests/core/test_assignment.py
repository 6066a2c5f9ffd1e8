"""Which structure each layer gets, and what the user is told about it."""

import pytest
import torch
from torch import nn

import optg
from optg.core.assignment import as_rules, implied_sparsity, label_of
from tests.toy import attach, batches, convnet, printed, step


def mobile() -> nn.Sequential:
    """Return a network with a 3-channel input and a depthwise convolution."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 3),
        nn.Conv2d(8, 8, 3, groups=8),
        nn.Conv2d(8, 16, 1),
        nn.Flatten(),
        nn.Linear(256, 10),
    )


def structures(sparsifier: optg.Sparsifier) -> dict[str, str]:
    return {layer.name: layer.structure for layer in sparsifier.layers()}


@pytest.mark.parametrize("text", ["2:4", "1x4", "4x1"])
def test_layers_with_too_few_inputs_stay_dense_and_the_summary_says_so(text):
    model = mobile()
    _, sparsifier = attach(model, structure=text, sparsity=None if ":" in text else 0.5)
    stem = [] if text == "4x1" else ["0.weight"]
    fewest = 2 if text == "4x1" else 4
    assert structures(sparsifier) == {n: text for n in ("0.weight", "2.weight", "4.weight") if n not in stem}
    assert f"dense (fewer than {fewest} inputs): {', '.join([*stem, '1.weight'])}" in printed(sparsifier.summary())


def test_the_first_matching_pattern_counts_and_others_are_unstructured():
    model = mobile()
    _, sparsifier = attach(
        model, structure={"4*": "unstructured", "2.weight": "1x2", nn.Linear: "2:4", "0": "1x3"}, sparsity=0.5
    )
    assert structures(sparsifier) == {
        "0.weight": "1x3", "1.weight": "unstructured", "2.weight": "1x2", "4.weight": "unstructured",
    }  # fmt: skip


def test_a_text_may_hold_patterns_too():
    given = "4*=unstructured, *=1x2"
    assert as_rules(given) == [("4*", "unstructured"), ("*", "1x2")]
    assert label_of(as_rules(given)) == given
    assert label_of(as_rules({nn.Linear: "2:4", ...: "1x2"})) == "Linear=2:4, 1x2"
    _, sparsifier = attach(mobile(), structure=given, sparsity=0.5)
    assert structures(sparsifier)["4.weight"] == "unstructured" and structures(sparsifier)["2.weight"] == "1x2"


def test_the_target_of_an_nm_structure_follows_from_it():
    _, sparsifier = attach(convnet(), structure="1:4", sparsity=None)
    assert sparsifier.weights.target == 0.75
    _, nominal = attach(convnet(), structure="1:4", sparsity=0.75)
    assert nominal.weights.target == 0.75
    with pytest.raises(ValueError, match=r"sparsity is 0\.9, but structure '1:4' makes it 0\.75; leave out `sparsity`"):
        attach(convnet(), structure="1:4", sparsity=0.9)


@pytest.mark.parametrize(
    ("text", "sparsity"),
    [
        ("1:4", 0.75), ("*=2:4", 0.5), ("0*=1:4, *=2:4", 0.75), ("*=2:4, 0*=1x4", None), ("0*=2:4", None),
        ("unstructured", None), ("1x4", None), ("fc*=unstructured, *=2:4", None),
    ],
)  # fmt: skip
def test_rules_that_are_all_nm_imply_a_sparsity(text, sparsity):
    assert implied_sparsity(text) == sparsity


def test_short_groups_count_in_the_target():
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 6), nn.Linear(6, 10))  # 6 inputs: a group of 4 and one of 2, kept whole
    _, sparsifier = attach(model, method="gmp", structure="2:4", sparsity=0.5)
    assert sparsifier.weights.target == (64 * 6 // 2 + 2 * 10) / (64 * 6 + 60)


@pytest.mark.parametrize(("text", "noted"), [("2:4", True), ("channel", True), ("1x4", False), ("unstructured", False)])
def test_the_summary_says_that_a_budget_of_erk_became_uniform(text, noted):
    sparsity = None if text == "2:4" else 0.5
    methods = optg.methods.GMP(budget="erk", every=1), *([] if text == "channel" else ["granet", "rigl"])
    for method in methods:
        model = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 10))
        optimizer, sparsifier = attach(model, method=method, structure=text, sparsity=sparsity, example=torch.zeros(1, 1, 8, 8))
        step(model, optimizer, batches(1)[0])
        shown = " ".join(printed(sparsifier.summary()).split())
        assert (f"uniform budget instead of erk, which {text} does not support" in shown) == noted
        densities = [layer.density for layer in sparsifier.layers()]
        assert (max(densities) - min(densities) < 0.05) == noted


def test_a_dict_of_unstructured_layers_only_counts_as_unstructured():
    _, sparsifier = attach(convnet(), method="str", structure={"*": "unstructured"}, sparsity=0.5)
    assert set(structures(sparsifier).values()) == {"unstructured"}


def test_beside_nm_the_sparsity_applies_to_the_other_layers():
    with pytest.raises(TypeError, match="needs `sparsity=`"):
        attach(convnet(), structure={"4*": "2:4"}, sparsity=None)
    model, structure = convnet(), {"4*": "2:4"}
    data = {"loss": lambda m, x: m(x).sum(), "batches": [torch.rand(2, 1, 8, 8)]}
    _, sparsifier = attach(model, method="snip", structure=structure, sparsity=0.9, **data)
    kept = {layer.name: layer.density for layer in sparsifier.layers()}
    assert kept["4.weight"] == 0.5
    rest = [layer for layer in sparsifier.layers() if layer.name != "4.weight"]
    assert sum(layer.kept for layer in rest) == int(0.1 * sum(layer.weights for layer in rest))


@pytest.mark.parametrize(
    ("structure", "message"),
    [
        ({"fc*": "2:4"}, r"no weight to prune matches 'fc\*'; a weight's name is, for example, 0\.weight"),
        ("3:2", "expected N:M"),
        ("64x64x2", "unknown structure"),
        (3, "structure is 3; expected a text such as '2:4', or a dict"),
        ("channel", "needs an input of the model, to find coupled channels: pass `example=`"),
    ],
)
def test_wrong_structures_are_refused(structure, message):
    with pytest.raises((ValueError, TypeError), match=message):
        attach(convnet(), structure=structure, sparsity=0.5)


def test_a_structure_that_fits_no_layer_is_refused():
    with pytest.raises(ValueError, match="structure '2:4' fits none of the 1 weights to prune: fewer than 4 inputs"):
        attach(nn.Sequential(nn.Conv2d(1, 8, 3)), structure="2:4", sparsity=None)


def test_channels_name_the_layers_that_stay_dense_and_the_size_after_shrinking():
    model, example = convnet(), torch.zeros(1, 1, 8, 8)
    optimizer, sparsifier = attach(model, method="gmp", structure="channel", sparsity=0.5, example=example)
    assert "after optg.shrink" not in printed(sparsifier.summary())  # nothing is removed yet
    for batch in batches(20):
        step(model, optimizer, batch)
    text = printed(sparsifier.summary())
    assert "dense (its units are outputs of the network): 7.weight" in text
    size = sum(p.numel() for p in optg.shrink(model, example).parameters())
    assert f"after optg.shrink: {size:,} of 1,962 parameters, " in text and size < 1000
    assert set(sparsifier.masks) == {"0.weight", "1.weight", "1.bias", "4.weight", "4.bias"}
    assert [layer.name for layer in sparsifier.layers()] == ["0.weight", "4.weight"]
    assert sparsifier.weights.size == 72 + 576


def test_channels_with_a_frozen_norm_stay_dense():
    model = convnet()
    model[1].requires_grad_(False)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    example = torch.zeros(1, 1, 8, 8)
    _, sparsifier = attach(model, optimizer, "gmp", structure="channel", sparsity=0.5, example=example)
    assert "channels shared with 1.bias, which is not pruned): 0.weight" in printed(sparsifier.summary())
    assert [layer.name for layer in sparsifier.layers()] == ["4.weight"]


def test_a_group_of_channels_never_vanishes():
    with pytest.raises(ValueError, match="removes 16 units of structure 'channel', but at most 14 can go"):
        attach(convnet(), structure="channel", sparsity=0.95, example=torch.zeros(1, 1, 8, 8))
