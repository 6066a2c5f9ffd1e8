"""When `sparsify` says that it leaves much of a model dense, and when it does not."""

import warnings

import pytest
import torch
from torch import nn

import optg
from optg.models import build


def sparsify(model: nn.Module, **options) -> optg.Sparsifier:
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    return optg.sparsify(model, optimizer, "gmp", sparsity=0.5, epochs=2, steps_per_epoch=2, **options)


class Mixer(nn.Module):
    """A block with a weight of its own."""

    def __init__(self, size: int = 30):
        super().__init__()
        self.mix = nn.Parameter(torch.randn(size, size))


def model_with_raw_weights() -> nn.Module:
    return nn.ModuleDict({"blocks": nn.Sequential(Mixer(), Mixer()), "head": nn.Linear(10, 10)})


def test_the_warning_names_share_layers_and_the_include_that_takes_them():
    message = (
        r"covers 5% of the matrix weights \(100 of 1,900\)\. "
        r"These stay dense: blocks\.0\.mix \(900\), blocks\.1\.mix \(900\)\. "
        r"To prune them too, pass include=\[\.\.\., 'blocks\.\*\.mix'\]"
    )
    with pytest.warns(UserWarning, match=message) as caught:
        sparsify(model_with_raw_weights())
    assert len(caught) == 1 and caught[0].filename == __file__


@pytest.mark.parametrize(
    "options", [{"include": [..., "blocks.*.mix"]}, {"include": ["head"]}, {"exclude": ["head", "*.mix"], "include": "*"}]
)
def test_the_advice_works_and_a_choice_is_not_questioned(options):
    with warnings.catch_warnings(action="error"):
        if "exclude" in options:
            with pytest.raises(ValueError, match="no prunable weight"):
                sparsify(model_with_raw_weights(), **options)
        else:
            expected = 3 if ... in options["include"] else 1
            assert len(sparsify(model_with_raw_weights(), **options).masks) == expected


def test_what_is_excluded_does_not_count():
    with warnings.catch_warnings(action="error"):
        sparsify(model_with_raw_weights(), exclude="*.mix")


def test_80_percent_is_enough():
    model = nn.ModuleDict({"mix": Mixer(10), "head": nn.Linear(20, 20)})
    with warnings.catch_warnings(action="error"):
        sparsify(model)
    with pytest.warns(UserWarning, match="covers 79% of the matrix weights"):
        sparsify(nn.ModuleDict({"mix": Mixer(10), "head": nn.Linear(20, 19)}))


class Tokens(nn.Module):
    """What transformers hold besides matrices: positions, tokens, embeddings, biases by position, scales."""

    def __init__(self):
        super().__init__()
        self.cls_token = nn.Parameter(torch.zeros(1, 1, 16))
        self.pos_embed = nn.Parameter(torch.zeros(1, 50, 16))
        self.positional_embedding = nn.Parameter(torch.zeros(50, 16))
        self.relative_position_bias_table = nn.Parameter(torch.zeros(49, 4))
        self.scale = nn.Parameter(torch.ones(16, 1, 1))
        self.attention = nn.Parameter(torch.ones(1, 4, 16))
        self.words = nn.Embedding(100, 16)
        self.norm = nn.LayerNorm((50, 16))
        self.frozen = nn.Linear(90, 90).requires_grad_(False)
        self.body = nn.Linear(16, 16)
        self.head = nn.Linear(16, 100)
        self.head.weight = self.words.weight


@pytest.mark.parametrize(
    "model", [Tokens, lambda: build("resnet32", 10), lambda: build("vgg19", 10), lambda: nn.TransformerEncoderLayer(16, 2)]
)
def test_no_false_alarm(model):
    with warnings.catch_warnings(action="error"):
        sparsify(model())
