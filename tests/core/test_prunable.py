"""Which weights are prunable, under what names, and what their dimensions mean."""

import warnings

import pytest
import torch
from torch import nn

import optg
from optg.core.prunable import find_prunable, parameters_by_name, unwrap


class Zoo(nn.Module):
    """One layer of each kind that is treated differently."""

    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv1d(2, 4, 3)
        self.conv2 = nn.Conv2d(4, 4, 3, groups=4)
        self.conv3 = nn.Conv3d(1, 2, 3)
        self.up = nn.ConvTranspose2d(4, 2, 2)
        self.norm = nn.LayerNorm(8)
        self.norm2 = nn.LayerNorm((8, 8))
        self.embed = nn.Embedding(11, 8)
        self.attention = nn.MultiheadAttention(8, 2, add_bias_kv=True)
        self.cross = nn.MultiheadAttention(8, 2, kdim=4, vdim=4)
        self.position = nn.Parameter(torch.zeros(1, 5, 8))
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.head = nn.Linear(8, 11)
        self.tied = nn.Linear(8, 11)
        self.tied.weight = self.embed.weight
        self.twin = nn.Linear(8, 11)
        self.twin.weight = self.head.weight


DEFAULT = [
    "conv1.weight",
    "conv2.weight",
    "conv3.weight",
    "up.weight",
    "attention.in_proj_weight",
    "attention.out_proj.weight",
    "cross.q_proj_weight",
    "cross.k_proj_weight",
    "cross.v_proj_weight",
    "cross.out_proj.weight",
    "head.weight",
]


def test_by_default_all_trained_layers_but_embeddings_and_weights_tied_to_them():
    assert list(find_prunable(Zoo(), None, ())) == DEFAULT


def test_include_and_exclude():
    zoo = Zoo()
    assert list(find_prunable(zoo, ["attention*"], ())) == ["attention.in_proj_weight", "attention.out_proj.weight"]
    assert list(find_prunable(zoo, [nn.Embedding], ())) == ["embed.weight"]
    assert list(find_prunable(zoo, ["embed"], ())) == ["embed.weight"]
    assert list(find_prunable(zoo, ["tied"], ())) == ["embed.weight"]  # one weight, one name
    assert list(find_prunable(zoo, ["twin.weight"], ())) == ["head.weight"]
    assert list(find_prunable(zoo, ["position"], ())) == ["position"]
    assert list(find_prunable(zoo, None, ["conv?", nn.MultiheadAttention, "*proj*"])) == ["up.weight", "head.weight"]


@pytest.mark.parametrize("pattern", ["nothing*", "norm", "norm2", nn.LayerNorm, "*.bias", "frozen", nn.LSTM])
def test_a_pattern_that_matches_nothing_is_refused(pattern):
    for include, exclude in (([pattern], ()), (None, [pattern])):
        with pytest.raises(ValueError, match="matches no prunable weight"):
            find_prunable(Zoo(), include, exclude)


@pytest.mark.parametrize("include", [None, [nn.Linear], ["*"]])
def test_weights_computed_from_other_parameters_stay_dense_with_a_warning(include):
    """weight_norm divides a row by its norm: a row of zeros would become NaN."""
    new, old = nn.utils.parametrizations.weight_norm, nn.utils.weight_norm
    with pytest.warns(FutureWarning):
        model = nn.Sequential(new(nn.Linear(4, 4)), old(nn.Linear(4, 4)), nn.Linear(4, 4), new(nn.Linear(4, 4)))
    model[3].requires_grad_(False)
    with pytest.warns(UserWarning, match=r"some layers stay dense: 0, 1\. Their weights are computed from other parameters"):
        assert list(find_prunable(model, include, ())) == ["2.weight"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert list(find_prunable(model, include, ["0", "1"])) == ["2.weight"]


def test_wrappers_do_not_change_names():
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2)))
    names = list(parameters_by_name(model))
    assert names == ["0.weight", "0.bias", "1.0.weight", "1.0.bias"]
    averaged = torch.optim.swa_utils.AveragedModel(model)
    for wrapped in (torch.compile(model), nn.DataParallel(model), torch.compile(nn.DataParallel(model)), averaged):
        assert list(parameters_by_name(wrapped)) == names
    assert unwrap(torch.compile(model)) is model
    model[1].compile()
    inner = nn.Sequential(nn.Linear(2, 2), torch.compile(nn.Sequential(nn.Linear(2, 2))))
    assert list(parameters_by_name(inner)) == names


def test_a_lazy_module_is_refused():
    with pytest.raises(ValueError, match=r"0\.weight has no shape yet; run one batch"):
        find_prunable(nn.Sequential(nn.LazyLinear(3)), None, ())


@pytest.mark.parametrize(
    ("module", "axes"),
    [
        (nn.Linear(3, 5), (0, 1, 1)),
        (nn.Conv2d(3, 5, 3), (0, 1, 1)),
        (nn.ConvTranspose2d(3, 5, 3), (1, 0, 1)),
        (nn.Bilinear(2, 3, 4), (0, 1, 1)),
    ],
)
def test_axes_of_each_kind_of_layer(module, axes):
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    [layer] = optg.sparsify(module, optimizer, "gmp", sparsity=0.5, epochs=2, steps_per_epoch=2).layers()
    assert tuple(layer.axes) == axes and layer.weights == layer.kept and layer.density == 1.0


def test_stacked_attention_projections_have_three_parts():
    attention = nn.MultiheadAttention(8, 2)
    optimizer = torch.optim.SGD(attention.parameters(), lr=0.1)
    layers = optg.sparsify(attention, optimizer, "gmp", sparsity=0.5, epochs=2, steps_per_epoch=2).layers()
    assert {layer.name: layer.axes.parts for layer in layers} == {"in_proj_weight": 3, "out_proj.weight": 1}
