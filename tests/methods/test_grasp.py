"""GraSP against an explicit Hessian."""

from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.autograd.functional import hessian, jacobian

from optg.core.probe import Probe
from optg.methods import GraSP
from tests.toy import entropy, prune_before_training, weights_of


def two_layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()  # 12 and 8 weights


def data(*sizes: int) -> list:
    g = torch.Generator().manual_seed(1)
    return [(torch.randn(n, 3, generator=g).double(), torch.randint(2, (n,), generator=g)) for n in sizes]


def saliency(model, method, batches, loss=entropy) -> torch.Tensor:
    return torch.cat([s.flatten() for s in method.saliency(weights_of(model), Probe(model, loss, batches))])


def explicit_loss(model, batches, temperature):
    """Return the loss at softened outputs as a function of all 20 weights in one vector, and that vector."""
    w1, b1, w2, b2 = (p.detach() for p in model.parameters())

    def total(flat):
        first, second = flat[:12].view_as(w1), flat[12:].view_as(w2)
        outputs = [(torch.tanh(x @ first.T + b1) @ second.T + b2) / temperature for x, _ in batches]
        return sum(nn.functional.cross_entropy(out, y) for out, (_, y) in zip(outputs, batches)) / len(batches)

    return total, torch.cat([w1.flatten(), w2.flatten()])


@pytest.mark.parametrize("temperature", [1.0, 200.0])
@pytest.mark.parametrize("count", [1, 3])
def test_scores_equal_hessian_times_gradient_times_weight(count, temperature):
    model, batches = two_layers(), data(7, 3, 11)
    total, flat = explicit_loss(model, batches[:count], temperature)
    expected = hessian(total, flat) @ jacobian(total, flat) * flat
    ours = saliency(model, GraSP(batches=count, temperature=temperature), batches)
    assert float((ours - expected).abs().max()) < 1e-12 * float(expected.abs().max())
    assert expected.min() < 0 < expected.max()  # both signs occur, so a wrong sign would be noticed


def test_hessian_and_gradient_are_averaged_over_all_batches_before_their_product():
    """H·g of all batches is not the mean of H·g of each batch."""
    model, batches = two_layers(), data(7, 3)
    method = GraSP(batches=2, temperature=1.0)
    each = sum(saliency(model, GraSP(temperature=1.0), [b]) for b in batches) / 2
    assert not torch.allclose(saliency(model, method, batches), each, rtol=1e-3)


def test_the_score_predicts_how_the_gradient_norm_changes_when_a_weight_shrinks():
    """To first order, ‖g‖² changes by −2ε·(Hg)_i·w_i when weight i shrinks by a share ε. Checked by central differences."""
    model, batches = two_layers(), data(7)
    total, flat = explicit_loss(model, batches, 2.0)
    flow, ε = lambda w: jacobian(total, w).square().sum(), 1e-5
    ours = saliency(model, GraSP(temperature=2.0), batches)
    for i in range(20):
        shrink = torch.zeros_like(flat)
        shrink[i] = ε * flat[i]
        change = (flow(flat - shrink) - flow(flat + shrink)) / 2
        assert float(change) == pytest.approx(-2 * ε * float(ours[i]), rel=1e-4, abs=1e-14)


@pytest.mark.parametrize("sparsity, kept", [(0.25, [1, 0, 1, 1]), (0.5, [1, 0, 1, 0]), (0.75, [1, 0, 0, 0])])
def test_the_largest_values_of_minus_hgw_are_removed(sparsity, kept):
    model = nn.Linear(4, 1, bias=False)
    nn.init.ones_(model.weight)
    far = torch.tensor([0.0, 3.0, 0.5, 2.0])
    # L = ½ Σ (w_i − far_i)²: H = 1 and g = w − far, so −(Hg)·w at w = 1 is far − 1 = (−1, 2, −0.5, 1)

    def loss(model, x):
        return (model(x).flatten() - far).square().sum() / 2

    sparsifier = prune_before_training(model, GraSP(temperature=1.0), sparsity, [torch.eye(4)], loss)
    assert sparsifier.masks["weight"].int().tolist() == [kept]


def test_both_layers_are_ranked_together():
    model, batches = two_layers(), data(7, 3)
    total, flat = explicit_loss(model, batches, 200.0)
    harm = -(hessian(total, flat) @ jacobian(total, flat)) * flat
    sparsifier = prune_before_training(model, GraSP(batches=2), 0.6, batches)
    expected = torch.ones(20, dtype=torch.bool)
    expected[harm.sort(descending=True).indices[:12]] = False
    assert torch.equal(torch.cat([m.flatten() for m in sparsifier.masks.values()]), expected)


@pytest.mark.filterwarnings("ignore:layer collapse")
def test_a_layer_without_effect_on_the_loss_scores_0():
    """Weights whose removal raises the gradient norm go before it; those whose removal lowers the norm go after it."""

    class WithUnusedLayer(nn.Module):
        def __init__(self):
            super().__init__()
            self.unused, self.used = nn.Linear(2, 3, bias=False), nn.Linear(4, 1, bias=False)

        def forward(self, x):
            return self.used(x).flatten()

    model, far, method = WithUnusedLayer(), torch.tensor([0.0, 3.0, 0.5, 2.0]), GraSP(temperature=1.0)
    nn.init.ones_(model.used.weight)

    def loss(model, x):  # as above: (Hg)·w = 1 − far
        return (model(x) - far).square().sum() / 2

    assert saliency(model, method, [torch.eye(4)], loss).tolist() == [0, 0, 0, 0, 0, 0, 1, -2, 0.5, -1]
    masks = prune_before_training(model, method, 0.8, [torch.eye(4)], loss).masks
    assert not masks["unused.weight"].any() and masks["used.weight"].int().tolist() == [[1, 0, 1, 0]]


def test_models_with_attention_can_be_scored():
    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv = nn.Linear(8, 24)

        def forward(self, x):
            q, k, v = self.qkv(x).unflatten(-1, (3, 1, 8)).permute(2, 0, 3, 1, 4)
            return nn.functional.scaled_dot_product_attention(q, k, v).mean((1, 2))

    torch.manual_seed(0)
    batch = torch.randn(4, 5, 8), torch.randint(8, (4,))
    assert prune_before_training(Attention(), GraSP(), 0.5, [batch]).sparsity == 0.5


def test_all_scores_are_0_if_the_loss_is_linear_in_the_weights():
    assert not saliency(nn.Linear(3, 2), GraSP(), [torch.ones(1, 3)], lambda model, x: model(x).sum()).any()


@pytest.mark.parametrize("call", [lambda model, x: model.forward(x), lambda model, x: model[2](model[1](model[0](x)))])
def test_a_loss_that_does_not_call_the_model_is_softened_or_refused(call):
    model, batches = two_layers(), data(7)
    try:
        ours = saliency(
            model, GraSP(), batches, lambda model, batch: nn.functional.cross_entropy(call(model, batch[0]), batch[1])
        )
    except ValueError:
        return
    torch.testing.assert_close(ours, saliency(model, GraSP(), batches))


@pytest.mark.parametrize("pack", [lambda out: (out, None), lambda out: {"logits": out}], ids=["tuple", "dict"])
def test_outputs_may_be_a_tuple_or_a_dict(pack):
    class Packed(nn.Sequential):
        def forward(self, x):
            return pack(super().forward(x))

    def unpacked(model, batch):
        out = model(batch[0])
        return nn.functional.cross_entropy(out["logits"] if isinstance(out, dict) else out[0], batch[1])

    plain, batches = two_layers(), data(7)
    assert torch.equal(saliency(Packed(*plain), GraSP(), batches, unpacked), saliency(plain, GraSP(), batches))


def test_an_output_that_cannot_be_softened_is_refused():
    @dataclass
    class Answer:
        logits: torch.Tensor

    class Answering(nn.Sequential):
        def forward(self, x):
            return Answer(super().forward(x))

    with pytest.raises((TypeError, ValueError)):
        saliency(Answering(*two_layers()), GraSP(), data(7), lambda m, b: nn.functional.cross_entropy(m(b[0]).logits, b[1]))


@pytest.mark.parametrize("temperature", [0.0, -1.0])
def test_bad_temperatures_are_refused(temperature):
    with pytest.raises(ValueError, match="temperature"):
        prune_before_training(two_layers(), GraSP(temperature=temperature), 0.5, data(7))


@pytest.mark.parametrize("part", ["the model", "a layer"])
def test_compiled_code_is_bypassed(part):
    """Compiled code has no second derivative."""
    expected = saliency(two_layers(), GraSP(), data(6))
    model = two_layers()
    if part == "the model":
        model.compile(backend="aot_eager")
    else:
        model[1] = torch.compile(model[1], backend="aot_eager")
    assert torch.equal(saliency(model, GraSP(), data(6)), expected)
