"""Groups of coupled channels: their members, and why some are refused."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from optg import models
from optg.core.channels import Group, coupled_channels
from optg.core.channels.moves import Channel, Flatten, Shift, Unflatten
from tests.core.channels.nets import STEPS, RandomNet, UNet, conv, fill
from tests.toy import convnet

IMAGE = torch.zeros(1, 3, 4, 4)


def table(groups: list[Group]) -> list[tuple[int, list[str], list[str]]]:
    """Return the size, the sources and the other members of each removable group."""
    return [
        (g.size, [m.name for m in g.sources], [f"{m.name}:{m.dim}" for m in g.members if not m.source])
        for g in groups
        if g.removable
    ]


def refusals(groups: list[Group]) -> dict[str, str]:
    return {group.sources[0].name: group.refusal for group in groups if not group.removable}


def test_layers_norms_statistics_and_consumers() -> None:
    groups = coupled_channels(convnet(), torch.zeros(1, 1, 8, 8))
    assert table(groups) == [
        (8, ["0.weight", "1.weight", "1.bias"], ["4.weight:1", "1.running_mean:0", "1.running_var:0"]),
        (8, ["4.weight", "4.bias"], ["7.weight:1"]),
    ]
    assert refusals(groups) == {"7.weight": "its units are outputs of the network"}
    columns = groups[1].members[-1].index
    assert torch.equal(columns, torch.arange(128).view(8, 16)), "a channel owns the 4×4 pixels of its flattened image"


def test_residual_sums_tie_layers() -> None:
    model = RandomNet([("residual", 4), ("residual", 5)], flatten=False, width=6)
    groups = coupled_channels(model, IMAGE)
    stream = ["stem", "layers.0.body.1", "layers.1.body.1"]
    assert table(groups)[0] == (
        6,
        [f"{layer}.{kind}" for layer in stream for kind in ("weight", "bias")],
        ["layers.0.body.0.0.weight:1", "layers.1.body.0.0.weight:1", "head.weight:1"],
    )
    assert [size for size, *_ in table(groups)] == [6, 4, 5]


def test_concatenated_channels_have_offsets() -> None:
    groups = coupled_channels(RandomNet([("dense", 2), ("dense", 3)], flatten=True, width=4), IMAGE)
    heads = [next(m for m in group.members if m.name == "head.weight") for group in groups[:3]]
    assert [head.index[:, 0].tolist() for head in heads] == [[0, 16, 32, 48], [64, 80], [96, 112, 128]]


def test_inputs_of_the_model_may_be_concatenated_too() -> None:
    class Joined(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = conv(3, 4), conv(7, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(torch.cat([x, self.first(x).relu()], 1))

    (group, _) = coupled_channels(Joined(), IMAGE)
    assert group.removable and group.members[-1].index.flatten().tolist() == [3, 4, 5, 6]


def test_groups_of_convolutions_and_norms_are_units() -> None:
    class Grouped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.split = conv(3, 6), conv(6, 12, groups=3)
            self.norm, self.last = nn.GroupNorm(3, 12), conv(12, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.norm(self.split(self.stem(x).relu())).relu())

    (group, _) = coupled_channels(Grouped(), IMAGE)
    assert group.removable and group.size == 3
    rows = {f"{m.name}:{m.dim}": m.index[1].tolist() for m in group.members}
    assert rows["stem.weight:0"] == [2, 3] and rows["split.weight:0"] == rows["norm.bias:0"] == [4, 5, 6, 7]
    assert rows["last.weight:1"] == [4, 5, 6, 7] and "split.weight:1" not in rows


def test_gated_halves_are_one_unit() -> None:
    groups = coupled_channels(RandomNet([("gate", 3)], flatten=False, width=4), IMAGE)
    gate = next(group for group in groups if group.sources[0].name == "layers.0.conv.weight")
    assert gate.sources[0].index.tolist() == [[0, 3], [1, 4], [2, 5]]


def test_tokens_and_sequences() -> None:
    class Swish(nn.Module):
        """The MLP of recent language models, with both projections in one layer."""

        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(4, 10), nn.Linear(5, 4)

        def forward(self, x: Tensor) -> Tensor:
            gate, value = self.up(x).chunk(2, dim=-1)
            return self.down(nn.functional.silu(gate) * value)

    (group, _) = coupled_channels(Swish(), torch.zeros(2, 3, 4))
    assert group.removable and group.sources[0].index.tolist() == [[i, i + 5] for i in range(5)]

    class Waves(nn.Module):
        """Two 1-d convolutions side by side."""

        def __init__(self) -> None:
            super().__init__()
            self.one, self.two, self.last = nn.Conv1d(2, 3, 1), nn.Conv1d(2, 4, 1), nn.Linear(7 * 6, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(torch.cat([self.one(x), self.two(x)], 1).relu().flatten(1))

    groups = coupled_channels(Waves(), torch.zeros(1, 2, 6))
    assert [(group.size, group.removable) for group in groups] == [(3, True), (4, True), (2, False)]
    assert groups[1].members[-1].index[0].tolist() == [18, 19, 20, 21, 22, 23]


@pytest.mark.parametrize(
    ("step", "refusal"),
    [
        ("sigmoid", "a zero does not stay 0"),
        ("no affine", "a zero does not stay 0"),
        ("softmax", "a zero does not stay 0"),
        ("layer norm", "it has only one unit"),
    ],
)
def test_groups_whose_zeros_change_something_are_refused(step: str, refusal: str) -> None:
    groups = coupled_channels(RandomNet([(step, 6)], flatten=False, width=4), IMAGE)
    assert refusals(groups).keys() == {"layers.0.0.weight", "head.weight"}
    assert refusals(groups)["layers.0.0.weight"].startswith(refusal)


@pytest.mark.parametrize("step", sorted({*STEPS} - {"sigmoid", "no affine", "softmax", "layer norm"}))
@pytest.mark.parametrize("flatten", [False, True])
def test_all_groups_but_the_outputs_are_removable(step: str, flatten: bool) -> None:
    groups = coupled_channels(RandomNet([("conv", 4), (step, 4), ("norm", 6)], flatten, width=4), IMAGE)
    assert refusals(groups) == {"head.weight": "its units are outputs of the network"}


def test_the_width_of_a_transformer_is_refused_and_its_mlps_are_not() -> None:
    groups = coupled_channels(models.build("vit_ti-cifar", 10), torch.zeros(1, 3, 32, 32))
    assert table(groups) == [
        (768, [f"blocks.{i}.linear1.weight", f"blocks.{i}.linear1.bias"], [f"blocks.{i}.linear2.weight:1"]) for i in range(12)
    ]
    assert "LayerNorm" in refusals(groups)["class_token"] or "MultiheadAttention" in refusals(groups)["class_token"]


def test_a_sum_with_the_input_is_refused() -> None:
    class Skip(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.last = conv(3, 3), conv(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(x + self.body(x))

    assert "without some of its units the model fails" in refusals(coupled_channels(Skip(), IMAGE))["body.weight"]


def test_layers_that_compute_their_weight_are_refused() -> None:
    model = nn.Sequential(conv(3, 4), nn.utils.parametrizations.weight_norm(conv(4, 4)), conv(4, 4), conv(4, 2))
    groups = coupled_channels(model, IMAGE)
    assert [size for size, *_ in table(groups)] == [4]
    assert refusals(groups)["0.weight"] == "its units run through a ParametrizedConv2d that computes its weight at every call"


def test_every_output_of_the_model_counts() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.last = conv(3, 4), conv(4, 2)

        def forward(self, x: Tensor) -> dict[str, Any]:
            features = self.body(x)
            return {"features": [features], "logits": self.last(features.relu())}

    groups = coupled_channels(Two(), IMAGE)
    assert {*refusals(groups).values()} == {"its units are outputs of the network"} and not table(groups)


def test_weights_that_are_zero_now_do_not_hide_an_error() -> None:
    """Zero-initialised layers and a zero example let nothing through; random weights are tried instead."""
    model = RandomNet([("sigmoid", 4)], flatten=False, width=4)
    for p in model.parameters():
        nn.init.zeros_(p)
    assert "layers.0.0.weight" in refusals(coupled_channels(model, IMAGE))


def test_a_model_that_computes_in_float32_only() -> None:
    class Single(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.last = nn.Linear(4, 6), nn.Linear(6, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.body(x.float()).relu())

    assert [size for size, *_ in table(coupled_channels(Single(), torch.zeros(1, 4)))] == [6]


def test_the_result_is_the_same_every_time_and_the_model_untouched() -> None:
    model = fill(UNet()).train()
    before, modes = copy.deepcopy(model.state_dict()), [m.training for m in model.modules()]
    example = torch.zeros(1, 3, 16, 16)
    state = torch.random.get_rng_state()
    first = coupled_channels(model, example)
    assert torch.equal(torch.random.get_rng_state(), state)
    second = coupled_channels(copy.deepcopy(model), example)
    for a, b in zip(first, second, strict=True):
        assert (a.refusal, [(m.name, m.dim, m.source) for m in a.members]) == (
            b.refusal,
            [(m.name, m.dim, m.source) for m in b.members],
        )
        assert all(torch.equal(m.index, n.index) for m, n in zip(a.members, b.members))
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert [m.training for m in model.modules()] == modes and all(p.grad is None for p in model.parameters())


def test_no_position_belongs_to_two_units() -> None:
    groups = coupled_channels(RandomNet([("dense", 3), ("residual", 4), ("grouped", 2)], True, width=5), IMAGE)
    positions = [(m.name, m.dim, i) for group in groups for m in group.members for i in m.index.flatten().tolist()]
    assert len(positions) == len({*positions})


@pytest.mark.parametrize("move", [Shift(3, 4), Flatten(4, 5, False), Flatten(4, 5, True)])
def test_moves_have_inverses(move: Shift | Flatten) -> None:
    channels = [Channel(i, 10 + i) for i in range(4)]
    assert move.leave(move.enter(channels)) == channels
    assert move.enter([Channel(99, 0)]) == [] and move.leave([Channel(99, 0)]) == []


def test_flattened_channels() -> None:
    assert [c.idx for c in Flatten(2, 3, channel_last=False).enter([Channel(1, 0)])] == [3, 4, 5]
    assert [c.idx for c in Flatten(2, 3, channel_last=True).enter([Channel(1, 0)])] == [1, 3, 5]
    assert [c.idx for c in Unflatten(2, 3, channel_last=False).enter([Channel(4, 0)])] == [1]
