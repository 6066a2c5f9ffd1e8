"""Parameters and FLOPs against numbers worked out by hand."""

from copy import deepcopy

import pytest
import torch
from torch import Tensor, nn

from optg.core.accounting import Account, count
from optg.core.layer_kinds import REGISTERED, prunable
from tests.toy import convnet

LAYERS = {  # layer, shape of one example, weights × positions
    "linear": (nn.Linear(6, 4), (6,), 24 * 1),
    "linear on tokens": (nn.Linear(6, 4), (5, 3, 6), 24 * 15),
    "conv1d": (nn.Conv1d(3, 5, 4), (3, 10), 60 * 7),
    "conv2d": (nn.Conv2d(3, 5, 3, padding=1), (3, 8, 6), 135 * 48),
    "conv2d, stride": (nn.Conv2d(3, 5, 3, padding=1, stride=2), (3, 8, 6), 135 * 12),
    "conv2d, groups": (nn.Conv2d(4, 6, 3, padding=1, groups=2), (4, 8, 8), 108 * 64),
    "conv2d, depthwise": (nn.Conv2d(4, 4, 3, padding=1, groups=4), (4, 8, 8), 36 * 64),
    "conv2d, dilation": (nn.Conv2d(1, 2, 3, dilation=2), (1, 8, 8), 18 * 16),
    "conv2d, uneven": (nn.Conv2d(1, 2, (1, 3), stride=(2, 1)), (1, 8, 8), 6 * 24),
    "conv3d": (nn.Conv3d(2, 3, 2), (2, 4, 4, 4), 48 * 27),
    "transposed 1d": (nn.ConvTranspose1d(2, 3, 4, stride=3), (2, 5), 24 * 5),
    "transposed 2d": (nn.ConvTranspose2d(4, 6, 3, stride=2, groups=2), (4, 5, 5), 108 * 25),
    "transposed 3d": (nn.ConvTranspose3d(2, 1, 2, stride=2), (2, 3, 3, 3), 16 * 27),
}


@pytest.mark.parametrize(("layer", "shape", "flops"), LAYERS.values(), ids=LAYERS)
@pytest.mark.parametrize("batch", [1, 3])
def test_flops_of_each_kind_of_layer(layer: nn.Module, shape: tuple[int, ...], flops: int, batch: int) -> None:
    account = count(layer, torch.randn(batch, *shape))
    assert account.flops == account.dense_flops == flops
    assert account.parameters == account.nonzero == layer.weight.numel() + layer.bias.numel()
    assert [(row.name, row.shape) for row in account.layers] == [("weight", tuple(layer.weight.shape))]


@pytest.mark.parametrize(("layer", "shape", "flops"), LAYERS.values(), ids=LAYERS)
def test_zeros_cost_no_flops(layer: nn.Module, shape: tuple[int, ...], flops: int) -> None:
    layer = deepcopy(layer)
    with torch.no_grad():
        layer.weight.zero_().view(-1)[:2] = 1.0
    account = count(layer, torch.randn(1, *shape))
    positions = flops // layer.weight.numel()
    assert (account.flops, account.dense_flops) == (2 * positions, flops)
    assert account.nonzero == 2 + layer.bias.numel()
    assert (account.layers[0].positions, account.layers[0].nonzero) == (positions, 2)


def test_bilinear() -> None:
    account = count(nn.Bilinear(2, 3, 4), (torch.randn(2, 5, 2), torch.randn(2, 5, 3)))
    assert account.flops == 24 * 5


def rows(account: Account) -> dict[str, tuple[int, int]]:
    return {layer.name: (layer.positions, layer.flops) for layer in account.layers}


@pytest.mark.parametrize("batch_first", [True, False])
def test_attention(batch_first: bool) -> None:
    attention = nn.MultiheadAttention(8, 2, batch_first=batch_first)
    query, memory = torch.randn(2, 5, 8), torch.randn(2, 7, 8)  # 2 examples, in which 5 tokens attend to 7
    if not batch_first:
        query, memory = query.transpose(0, 1), memory.transpose(0, 1)
    with torch.no_grad():
        attention.in_proj_weight[8] = 0.0  # the first row of the key projection
        attention.out_proj.weight[:, :4] = 0.0
    account = count(attention, {"query": query, "key": memory, "value": memory}, batch_size=2)
    assert rows(account) == {
        "in_proj_weight[query]": (5, 64 * 5),
        "in_proj_weight[key]": (7, 56 * 7),
        "in_proj_weight[value]": (7, 64 * 7),
        "out_proj.weight": (5, 32 * 5),
    }
    assert account.dense_flops == 64 * (5 + 7 + 7 + 5)
    assert (account.parameters, account.nonzero) == (256 + 32, 256 + 32 - 8 - 32)


def test_attention_with_other_widths_of_keys_and_values() -> None:
    attention = nn.MultiheadAttention(8, 2, kdim=6, vdim=4, batch_first=True)
    account = count(attention, (torch.randn(1, 5, 8), torch.randn(1, 7, 6), torch.randn(1, 7, 4)))
    assert rows(account) == {
        "q_proj_weight": (5, 64 * 5),
        "k_proj_weight": (7, 48 * 7),
        "v_proj_weight": (7, 32 * 7),
        "out_proj.weight": (5, 64 * 5),
    }


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("padded", [True, False])
def test_encoder_layers_are_counted_despite_their_fast_path(training: bool, padded: bool) -> None:
    layer = nn.TransformerEncoderLayer(8, 2, dim_feedforward=16, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 2).train(training)
    inputs: dict[str, Tensor] = {"src": torch.randn(3, 5, 8)}
    if padded:
        inputs["src_key_padding_mask"] = torch.arange(5).expand(3, 5) >= torch.tensor([[5], [4], [3]])
    assert count(encoder, inputs).flops == 2 * (4 * 64 + 2 * 128) * 5
    assert torch.backends.mha.get_fastpath_enabled()


class SharedAndUnused(nn.Module):
    """A layer that is called three times by keyword, one that shares its weight, and one that is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.repeated = nn.Linear(4, 4)
        self.tied = nn.Linear(4, 4)
        self.tied.weight = self.repeated.weight
        self.unused = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = self.repeated(input=x)
        return self.tied(x)


def test_shared_and_unused_layers() -> None:
    account = count(SharedAndUnused(), torch.randn(2, 4))
    assert rows(account) == {"repeated.weight": (4, 64), "unused.weight": (0, 0)}
    assert account.parameters == 16 + 4 + 4 + 8 + 2


def test_one_module_in_two_places() -> None:
    layer = nn.Linear(4, 4)
    account = count(nn.Sequential(layer, nn.ReLU(), layer), torch.randn(1, 4))
    assert rows(account) == {"0.weight": (2, 32)}
    assert account.parameters == 20


def test_zeros_in_norms_and_biases_count_as_parameters() -> None:
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2))
    nn.init.zeros_(model[1].weight)
    nn.init.zeros_(model[0].bias)
    assert count(model, torch.randn(1, 1, 8, 8)).nonzero == 18 + 2 + 4


def test_wrappers_do_not_change_the_counts() -> None:
    model, x = convnet(), torch.randn(2, 1, 8, 8)
    expected = count(model, x)
    assert expected.flops == 72 * 64 + 576 * 16 + 1280
    compiled = torch.compile(model, backend="eager")
    compiled(x)
    assert count(compiled, x) == expected
    inner = nn.Sequential(compiled)
    assert rows(count(inner, x)) == {f"0.{name}": row for name, row in rows(expected).items()}
    assert count(torch.optim.swa_utils.AveragedModel(model), x) == expected


class SideEffects(nn.Module):
    """Changes a buffer and draws random numbers even in evaluation mode; fails at the end of forward if asked to."""

    def __init__(self, fails: bool) -> None:
        super().__init__()
        self.net = convnet()
        self.register_buffer("calls", torch.zeros(()))
        self.fails = fails

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        x = self.net(x + torch.randn_like(x))
        if self.fails:
            raise RuntimeError("in forward")
        return x


@pytest.mark.parametrize("fails", [False, True])
def test_counting_leaves_no_trace_on_the_model(fails: bool) -> None:
    model = SideEffects(fails).train()
    model.net[1].eval()  # one norm in evaluation mode, as in fine-tuning
    modes = [module.training for module in model.modules()]
    state = {name: value.clone() for name, value in model.state_dict().items()}
    rng = torch.get_rng_state()
    if fails:
        with pytest.raises(RuntimeError, match="in forward"):
            count(model, torch.ones(2, 1, 8, 8))
    else:
        count(model, torch.ones(2, 1, 8, 8))
    assert [module.training for module in model.modules()] == modes
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), rng)
    assert not any(module._forward_hooks for module in model.modules())
    assert torch.backends.mha.get_fastpath_enabled()
    assert all(p.grad is None for p in model.parameters())


def test_without_an_input_tensor_the_batch_size_must_be_given() -> None:
    class TakesList(nn.Linear):
        def forward(self, xs: list[Tensor]) -> Tensor:  # type: ignore[override]
            return super().forward(torch.stack(xs))

    with pytest.raises(ValueError, match="give batch_size"):
        count(TakesList(3, 2), [torch.ones(3)])
    assert count(TakesList(3, 2), [torch.ones(3), torch.ones(3)], batch_size=2).flops == 6


def vgg19() -> nn.Sequential:
    """VGG-19 for CIFAR, as in the paper's tables."""
    layers: list[nn.Module] = []
    channels = 3
    for width, depth in ((64, 2), (128, 2), (256, 4), (512, 4), (512, 4)):
        for _ in range(depth):
            layers += [nn.Conv2d(channels, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
            channels = width
        layers.append(nn.MaxPool2d(2))
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(512, 10))


def test_vgg19() -> None:
    model = vgg19()
    for p in model.parameters():
        nn.init.constant_(p, 0.01)  # one of 20 million random numbers may be exactly 0
    account = count(model, torch.randn(1, 3, 32, 32))
    assert account.parameters == account.nonzero == 20_035_018
    assert account.flops == account.dense_flops == 398_136_320  # the paper: 398 M
    assert len(account.layers) == 17


# ---- recurrent layers, layers of other packages, experts


class Outputs(nn.Module):
    """Returns the first result of a recurrent layer, and takes a packed sequence if asked to."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor, lengths: list[int] | None = None) -> Tensor:
        if lengths:
            return self.layer(nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True))[0].data
        return self.layer(x)[0]


@pytest.mark.parametrize(("kind", "gates"), [("LSTM", 4), ("GRU", 3), ("RNN", 1)])
def test_recurrent_layers_apply_their_weights_at_every_time_step(kind: str, gates: int) -> None:
    model = Outputs(getattr(nn, kind)(6, 5, batch_first=True))
    with torch.no_grad():
        model.layer.weight_hh_l0[0] = 0.0
    account = count(model, torch.randn(2, 7, 6))  # 2 examples of 7 time steps
    ih, hh = gates * 5 * 6, gates * 5 * 5
    assert rows(account) == {"layer.weight_ih_l0": (7, ih * 7), "layer.weight_hh_l0": (7, (hh - 5) * 7)}
    assert account.dense_flops == (ih + hh) * 7


def test_layers_directions_and_projections_of_an_lstm() -> None:
    account = count(Outputs(nn.LSTM(6, 5, 2, bidirectional=True, proj_size=3, batch_first=True)), torch.randn(1, 4, 6))
    first, second, recurrent, projection = 20 * 6, 20 * 6, 20 * 3, 3 * 5  # the second layer reads 2 × 3 outputs of the first
    assert account.flops == 4 * 2 * (first + second + 2 * recurrent + 2 * projection)
    assert len(account.layers) == 12


def test_padding_of_a_packed_sequence_costs_nothing() -> None:
    account = count(Outputs(nn.GRU(6, 5, batch_first=True)), (torch.randn(2, 7, 6), [7, 3]))
    assert account.flops == (15 * 6 + 15 * 5) * 5  # 10 time steps for 2 examples


@pytest.mark.parametrize(("kind", "gates"), [("LSTMCell", 4), ("GRUCell", 3), ("RNNCell", 1)])
def test_recurrent_cells(kind: str, gates: int) -> None:
    account = count(getattr(nn, kind)(6, 5), torch.randn(3, 6))
    assert rows(account) == {"weight_ih": (1, gates * 30), "weight_hh": (1, gates * 25)}


class Conv1D(nn.Module):
    """Like that of transformers: a linear layer with an input-first weight."""

    def __init__(self, nf: int, nx: int) -> None:
        super().__init__()
        self.nf = nf
        self.weight = nn.Parameter(torch.randn(nx, nf))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


class Channels(nn.Module):
    """Like PyG's Linear."""

    def __init__(self) -> None:
        super().__init__()
        self.in_channels, self.out_channels = 6, 4
        self.weight = nn.Parameter(torch.randn(4, 6))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.T


class Adapted(nn.Module):
    """Like PEFT's layers: it has the sizes and the weight of the layer inside it."""

    def __init__(self) -> None:
        super().__init__()
        self.base_layer = nn.Linear(6, 4)
        self.in_features, self.out_features = 6, 4

    @property
    def weight(self) -> Tensor:
        return self.base_layer.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x)


@pytest.mark.parametrize("layer", [Conv1D(4, 6), Channels(), Adapted()])
def test_linear_layers_of_other_packages(layer: nn.Module) -> None:
    assert count(layer, torch.randn(2, 5, 6)).flops == 24 * 5


def test_registered_classes() -> None:
    class Mix(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mix, self.bias = nn.Parameter(torch.randn(6, 4)), nn.Parameter(torch.randn(1, 4))

        def forward(self, x: Tensor) -> Tensor:
            return x @ self.mix + self.bias

    assert count(Mix(), torch.randn(2, 5, 6)).layers == []
    prunable(Mix, output=1, input=0)
    try:
        assert rows(count(Mix(), torch.randn(2, 5, 6))) == {"mix": (5, 24 * 5)}
    finally:
        del REGISTERED[Mix]


class Experts(nn.Module):
    """Three experts, each a linear layer without an activation; token i goes to the experts `routes[i]`."""

    def __init__(self) -> None:
        super().__init__()
        self.down_proj = nn.Parameter(torch.randn(3, 4, 6))
        self.down_proj_bias = nn.Parameter(torch.randn(3, 4))

    def forward(self, x: Tensor, routes: Tensor | None = None) -> Tensor:
        if routes is None:
            return torch.bmm(x.view(3, -1, 6), self.down_proj.transpose(1, 2)).view(-1, 4)
        return torch.einsum("ti,tkoi->to", x, self.down_proj[routes])


def test_tokens_count_for_the_experts_they_are_routed_to() -> None:
    model = Experts()
    with torch.no_grad():
        model.down_proj[0] = 0.0
        model.down_proj[1, 0] = 0.0  # 18 of 24 weights are left
    routes = torch.tensor([[0, 1], [0, 1], [0, 2], [0, 1]])
    account = count(model, (torch.randn(4, 6), routes), batch_size=1)
    assert account.flops == 0 * 4 + 18 * 3 + 24 * 1
    assert account.dense_flops == 24 * 8
    assert [(row.name, row.nonzero) for row in account.layers] == [("down_proj", 42)]


def test_without_routes_experts_share_the_rows_of_the_input() -> None:
    assert count(Experts(), torch.randn(9, 6), batch_size=1).flops == 24 * 9
