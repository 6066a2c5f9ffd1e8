"""SynFlow against plain autograd on absolute weights, and its conservation law."""

import copy
import warnings

import pytest
import torch
from torch import nn

from optg.core.masks import Masks
from optg.core.probe import Probe
from optg.core.prunable import find_prunable
from optg.core.ranking import zeros_at
from optg.methods import SNIP, SynFlow
from tests.toy import batches, convnet, entropy, prune_before_training, weights_of


def flow(model, batch, loss=entropy) -> list[torch.Tensor]:
    probe = Probe(model, loss, [batch])
    return [score.detach() for score in probe.synaptic_flow(weights_of(model), probe.ones())]


def mlp(bias: bool) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Linear(5, 7, bias=bias), nn.ReLU(), nn.Linear(7, 4, bias=bias), nn.ReLU(), nn.Linear(4, 3, bias=bias)]
    return nn.Sequential(*layers)


def vectors(count: int = 6):
    g = torch.Generator().manual_seed(1)
    return torch.randn(count, 5, generator=g), torch.randint(3, (count,), generator=g)


# ---- the scores


@pytest.mark.parametrize("bias", [True, False])
def test_scores_of_linear_layers(bias):
    model = mlp(bias)
    absolute = [p.detach().double().abs().requires_grad_() for p in model.parameters()]
    h = torch.ones(1, 5).double()
    for i in range(0, len(absolute), 2 if bias else 1):
        h = (h @ absolute[i].T + (absolute[i + 1] if bias else 0)).relu()
    h.sum().backward()
    for ours, w in zip(flow(model, vectors()), absolute[:: 2 if bias else 1], strict=True):
        torch.testing.assert_close(ours, w.grad * w, rtol=1e-12, atol=0)


def test_scores_of_convolutions_use_the_running_statistics_of_batch_norm():
    """Although the model is in training mode, the flow is computed in evaluation mode, without dropout."""
    torch.manual_seed(0)
    model = nn.Sequential(*convnet(), nn.Dropout(0.5))
    model[1].running_mean.uniform_(-1, 1), model[1].running_var.uniform_(0.5, 2), nn.init.normal_(model[1].weight)
    conv, norm, conv2, linear = model[0], model[1], model[4], model[7]
    w1, w2, w3 = ws = [m.weight.detach().double().abs().requires_grad_() for m in (conv, conv2, linear)]
    gain, shift, b2, b3 = (p.detach().double().abs() for p in (norm.weight, norm.bias, conv2.bias, linear.bias))
    h = nn.functional.conv2d(torch.ones(1, 1, 8, 8).double(), w1, padding=1)
    mean, deviation = norm.running_mean.double(), (norm.running_var.double() + norm.eps).sqrt()
    h = ((h - mean[:, None, None]) / deviation[:, None, None] * gain[:, None, None] + shift[:, None, None]).relu()
    h = nn.functional.conv2d(nn.functional.max_pool2d(h, 2), w2, b2, padding=1).relu()
    (h.flatten(1) @ w3.T + b3).sum().backward()
    for ours, w in zip(flow(model, batches(1)[0]), ws, strict=True):
        torch.testing.assert_close(ours, w.grad * w, rtol=1e-9, atol=0)


def test_the_flow_does_not_depend_on_the_data():
    model = mlp(bias=True)
    for a, b in zip(flow(model, vectors()), flow(model, (vectors(2)[0] * 100, vectors(2)[1]))):
        assert torch.equal(a, b)


# ---- the conservation law


def small_convnet() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 6, 3, padding=1, bias=False),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(6, 4, 3, stride=2, bias=False),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(4, 10, bias=False),
    )


@pytest.mark.parametrize("model, batch", [(mlp(False), vectors()), (small_convnet(), batches(1)[0])], ids=["mlp", "convnet"])
@pytest.mark.parametrize("sparsity", [0.0, 0.5])
def test_the_scores_of_each_layer_add_up_to_the_output(model, batch, sparsity):
    model = copy.deepcopy(model)
    prune_before_training(model, SynFlow(rounds=3), sparsity, [batch])  # the law holds for sparse models too
    scores = flow(model, batch)
    absolute = copy.deepcopy(model).double()
    with torch.no_grad():
        for p in absolute.parameters():
            p.abs_()
        out = absolute(torch.ones_like(batch[0][:1]).double()).sum()
    assert [float(s.sum()) for s in scores] == pytest.approx([float(out)] * 3, rel=1e-12)
    assert out > 0 and all((s >= 0).all() for s in scores)


# ---- the rounds


def test_each_round_cuts_by_the_flow_through_the_remaining_weights():
    """Round r of 3 keeps a share of (1 − P)^(r/3)."""
    model, sparsity = mlp(bias=True), 0.7
    parameters = [p.detach().double().abs() for p in model.parameters()]
    masks = [torch.ones_like(w) for w in parameters[::2]]
    for share in (0.3 ** (1 / 3), 0.3 ** (2 / 3), 0.3):
        ws = [(w * m).requires_grad_() for w, m in zip(parameters[::2], masks)]
        h = torch.ones(1, 5).double()
        for w, b in zip(ws, parameters[1::2]):
            h = (h @ w.T + b).relu()
        h.sum().backward()
        scores = torch.cat([(w.grad * w).detach().flatten() for w in ws])
        zeros = scores.sort(stable=True).indices[: zeros_at(1 - share, 75)]
        kept = torch.ones(75, dtype=torch.double).index_fill(0, zeros, 0.0)
        masks = [part.view_as(w) for part, w in zip(kept.split([35, 28, 12]), ws)]
    found = prune_before_training(model, SynFlow(rounds=3), sparsity, [vectors()]).masks.values()
    for ours, mask in zip(found, masks, strict=True):
        assert torch.equal(ours, mask.bool())
    once = prune_before_training(mlp(bias=True), SynFlow(rounds=1), sparsity, [vectors()]).masks.values()
    assert not all(torch.equal(a, b) for a, b in zip(found, once))  # one round would give other masks


@pytest.mark.parametrize("sparsity", [0.0, 0.1, 1 / 3, 0.5, 0.987, 0.9994])
@pytest.mark.parametrize("rounds", [1, 7])
@pytest.mark.filterwarnings("ignore:layer collapse")
def test_the_count_is_exact(sparsity, rounds):
    torch.manual_seed(0)
    masks = prune_before_training(convnet(), SynFlow(rounds=rounds), sparsity, batches(1)).masks.values()
    assert sum(int((~m).sum()) for m in masks) == zeros_at(sparsity, 1928)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_kept_weights_and_all_other_tensors_are_unchanged_bit_for_bit(dtype):
    torch.manual_seed(0)
    model = convnet().to(dtype)
    before = copy.deepcopy(model.state_dict())
    masks = prune_before_training(model, SynFlow(rounds=5), 0.9, batches(1, dtype=dtype)).masks
    for name, now in model.state_dict().items():
        assert now.dtype == before[name].dtype
        assert torch.equal(now, torch.where(masks[name], before[name], 0.0) if name in masks else before[name])
    assert any((before[name][mask] < 0).any() for name, mask in masks.items())  # signs are kept


# ---- VGG-19


def vgg19(divisor: int = 1) -> nn.Sequential:
    """Return VGG-19 for CIFAR, with its number of channels divided by `divisor`."""
    layers, channels = [], 3
    for width in [64, 64, 0, 128, 128, 0, 256, 256, 256, 256, 0, 512, 512, 512, 512, 0, 512, 512, 512, 512]:
        if width == 0:
            layers.append(nn.MaxPool2d(2))
            continue
        conv = nn.Conv2d(channels, width // divisor, 3, padding=1, bias=False)
        layers += [conv, nn.BatchNorm2d(width // divisor), nn.ReLU()]
        channels = width // divisor
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 10))


def kept_by_layer(method, sparsity: float) -> list[int]:
    torch.manual_seed(0)
    batch = torch.randn(8, 3, 32, 32), torch.randint(10, (8,))
    with warnings.catch_warnings(action="ignore"):
        return [int(m.sum()) for m in prune_before_training(vgg19(divisor=8), method, sparsity, [batch]).masks.values()]


def test_the_model_of_these_tests_has_the_size_of_vgg19():
    model = vgg19()
    assert sum(p.numel() for p in model.parameters()) == 20_035_018
    assert sum(p.numel() for p in find_prunable(model, None, ()).values()) == 20_024_000


def test_no_layer_of_vgg19_collapses_at_99_percent():
    kept = kept_by_layer(SynFlow(), 0.99)
    assert len(kept) == 17 and sum(kept) == 313_624 - zeros_at(0.99, 313_624)
    assert min(kept) > 0.5 * sum(kept) / 17  # no layer is even close: all keep a similar number


@pytest.mark.parametrize("method", [SNIP(), SynFlow(rounds=1)], ids=["snip", "one round"])
def test_in_one_round_layers_of_vgg19_collapse(method):
    kept = kept_by_layer(method, 0.99)
    assert kept.count(0) >= 3 and sum(kept) == 313_624 - zeros_at(0.99, 313_624)


# ---- ways to call a model


class Tokens(nn.Module):
    """Takes integer tokens, and keywords for a float tensor and a plain number."""

    def __init__(self):
        super().__init__()
        self.embed, self.first, self.last = nn.Embedding(9, 4), nn.Linear(4, 6), nn.Linear(6, 9)

    def forward(self, tokens, *, weight, power=1):
        return self.last(self.first(self.embed(tokens) * weight[..., None]).relu() ** power)


def test_tokens_stay_and_all_float_inputs_become_ones():
    torch.manual_seed(0)
    model, tokens = Tokens(), torch.randint(9, (3, 5))

    def loss(model, batch):
        return model(batch, weight=torch.rand(3, 5), power=2).sum()

    (args, kwargs) = Probe(model, loss, [tokens]).ones()
    assert len(args) == 1 and torch.equal(args[0], tokens[:1])
    assert kwargs["power"] == 2 and torch.equal(kwargs["weight"], torch.ones(1, 5)) and len(kwargs) == 2
    e, w1, b1, w2, b2 = absolute = [p.detach().double().abs().requires_grad_() for p in model.parameters()]
    ((e[tokens[:1]] @ w1.T + b1).relu() ** 2 @ w2.T + b2).sum().backward()
    for ours, w in zip(flow(model, tokens, loss), absolute[1::2], strict=True):
        torch.testing.assert_close(ours, w.grad * w, rtol=1e-12, atol=0)
    masks = prune_before_training(model, SynFlow(rounds=3), 0.5, [tokens], loss).masks
    assert sum(int((~m).sum()) for m in masks.values()) == 39  # of 24 + 54: the embedding is not prunable


class CustomCall(nn.Module):
    """Calls a layer through a given function."""

    def __init__(self, call):
        super().__init__()
        self.layer, self.call = nn.Linear(5, 3), call

    def forward(self, *args):
        return self.call(self.layer, *args)


cannot_run_in_float64 = pytest.mark.xfail(
    strict=True, raises=RuntimeError, reason="a model that converts to a fixed dtype does not run in float64"
)


@pytest.mark.parametrize(
    "call, args",
    [
        pytest.param(lambda layer, x, s: layer(x) * s, lambda x: (x, torch.tensor(2.0)), id="0-dim"),
        pytest.param(lambda layer, d: layer(d["x"]), lambda x: ({"x": x},), id="dict"),
        pytest.param(lambda layer, d: layer(d[0]), lambda x: ([x, None],), id="list"),
        pytest.param(lambda layer, x: (layer(x), None), lambda x: (x,), id="tuple output"),
        pytest.param(lambda layer, x: layer(x.float()), lambda x: (x,), id="float32 inside", marks=cannot_run_in_float64),
    ],
)
def test_other_ways_to_call_a_model(call, args):
    def loss(model, batch):
        out = model(*args(batch[0]))
        return nn.functional.cross_entropy(out[0] if isinstance(out, tuple) else out, batch[1])

    torch.manual_seed(0)
    assert prune_before_training(CustomCall(call), SynFlow(rounds=2), 0.4, [vectors()], loss).sparsity == 0.4


def test_a_loss_that_does_not_call_the_model_is_refused():
    with pytest.raises(ValueError, match="loss"):
        prune_before_training(mlp(True), SynFlow(), 0.5, [vectors()], lambda model, batch: model.forward(batch[0]).sum())


# ---- errors and edge cases


@pytest.mark.parametrize("rounds", [0, -3])
def test_fewer_than_one_round_is_refused(rounds):
    with pytest.raises(ValueError, match="rounds"):
        prune_before_training(mlp(True), SynFlow(rounds=rounds), 0.5, [vectors()])


def test_an_interruption_leaves_the_model_unchanged():
    class Fuse(nn.Identity):
        passes = 3

        def forward(self, x):
            Fuse.passes -= 1
            if Fuse.passes == 0:
                raise KeyboardInterrupt
            return x

    model = mlp(True).append(Fuse())
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(KeyboardInterrupt):
        prune_before_training(model, SynFlow(rounds=10), 0.9, [vectors()])
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), before.values()))


def with_disconnected_weights() -> tuple[nn.Sequential, tuple]:
    """Return a model and a batch. At 60 %, some kept weights are disconnected and score 0, like removed ones."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 4, bias=False), nn.ReLU(), nn.Linear(4, 3, bias=False))
    return model, (torch.randn(4, 6), torch.randint(3, (4,)))


def test_removed_weights_do_not_come_back_in_later_rounds(monkeypatch):
    revived, record = [], Masks.record

    def watch(self, counts):
        record(self, counts)
        revived.append(int(self.counts[:, 2].sum()))

    monkeypatch.setattr(Masks, "record", watch)
    model, batch = with_disconnected_weights()
    prune_before_training(model, SynFlow(), 0.6, [batch])
    assert len(revived) == 100 and sum(revived) == 0


def test_a_model_may_create_tensors_in_its_forward_pass():
    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm, self.head = nn.LSTM(5, 4, batch_first=True), nn.Linear(4, 3)

        def forward(self, x):
            state = torch.zeros(1, len(x), 4)
            return self.head(self.lstm(x[:, None], (state, state))[0][:, -1])

    torch.manual_seed(0)
    model = Recurrent()
    sparsifier = prune_before_training(model, SynFlow(), 0.5, [vectors()])
    assert sparsifier.sparsity == 0.5 and model(vectors()[0]).dtype == torch.get_default_dtype() == torch.float32
