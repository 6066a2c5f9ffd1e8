"""A probe leaves no trace: the model and its further training are the same as without it."""

import copy
import random

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import optg
from optg.core.probe import Probe
from tests.toy import batches, step, weights_of


class Stop(Exception):
    pass


class Fuse(nn.Module):
    """Raises after a number of forward passes, counted over all copies of the model."""

    passes = float("inf")

    def forward(self, x):
        if Fuse.passes <= 0:
            raise Stop
        Fuse.passes -= 1
        return x


@pytest.fixture(autouse=True)
def fuse():
    yield
    Fuse.passes = float("inf")


def network() -> nn.Sequential:
    """Return a model with batch norm in both modes, dropout, a frozen weight and some gradients."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1),
        nn.BatchNorm2d(4),
        nn.Tanh(),
        nn.Dropout(0.5),
        nn.Sequential(nn.Conv2d(4, 4, 3, bias=False), nn.BatchNorm2d(4), nn.Tanh()),
        nn.Flatten(),
        Fuse(),
        nn.Linear(4 * 36, 10),
    )
    model[4][1].eval()
    model[1].weight.requires_grad_(False)
    for p in (model[0].weight, model[7].bias):
        p.grad = torch.randn_like(p)
    return model


class Loss:
    """Cross-entropy that records its batches and may fail at one of them."""

    def __init__(self, fails_at: int | None = None):
        self.seen, self.fails_at = [], fails_at

    def __call__(self, model, batch):
        self.seen.append(batch)
        if len(self.seen) == self.fails_at:
            raise Stop
        return nn.functional.cross_entropy(model(batch[0]), batch[1])


ONES = [torch.ones(1, 1, 8, 8)], {}
PROBES = {
    "gradients": lambda probe, weights: probe.gradients(weights, 3),
    "hessian_gradients": lambda probe, weights: probe.hessian_gradients(weights, 3, 200.0),
    "ones": lambda probe, weights: probe.ones(),
    "synaptic_flow": lambda probe, weights: probe.synaptic_flow(weights, ONES),
}
every_probe = pytest.mark.parametrize("probe_with", PROBES.values(), ids=PROBES)


class Snapshot:
    """Everything that a probe could change, for a comparison after it."""

    def __init__(self, model):
        self.model, self.state = model, copy.deepcopy(model.state_dict())
        self.grads = [(p.grad, None if p.grad is None else p.grad.clone()) for p in model.parameters()]
        self.modes = [m.training for m in model.modules()]
        self.rng = torch.get_rng_state()

    def assert_unchanged(self):
        for name, now in self.model.state_dict().items():  # parameters, running statistics, num_batches_tracked
            assert torch.equal(now, self.state[name]), name
        for p, (grad, value) in zip(self.model.parameters(), self.grads, strict=True):
            assert p.grad is grad and (grad is None or torch.equal(grad, value))
        assert [m.training for m in self.model.modules()] == self.modes
        assert torch.equal(torch.get_rng_state(), self.rng)
        for m in self.model.modules():
            assert not m._forward_hooks and not m._forward_pre_hooks


@every_probe
@pytest.mark.parametrize("training", [True, False])
def test_a_probe_changes_nothing(probe_with, training):
    model = network()
    if not training:
        model.eval()
    snapshot = Snapshot(model)
    probe_with(Probe(model, Loss(), batches(4)), weights_of(model))
    snapshot.assert_unchanged()


def test_an_ordinary_backward_pass_does_change_this_model():
    model = network()
    snapshot = Snapshot(model)
    Loss()(model, batches(1)[0]).backward()
    assert not torch.equal(model[1].running_mean, snapshot.state["1.running_mean"])
    assert not torch.equal(torch.get_rng_state(), snapshot.rng)
    assert not torch.equal(model[0].weight.grad, snapshot.grads[0][1])


@pytest.mark.parametrize(
    "name, fails_at, passes",
    [
        ("gradients", 1, None),  # in the loss, before the model is called
        ("gradients", 2, None),
        ("gradients", None, 0),  # in the model, after some layers
        ("gradients", None, 2),
        ("hessian_gradients", 2, None),
        ("hessian_gradients", 5, None),  # in the second pass over the batches
        ("hessian_gradients", None, 1),
        ("hessian_gradients", None, 4),
        ("ones", 1, None),
        ("synaptic_flow", None, 0),
    ],
)
def test_a_failing_probe_changes_nothing(name, fails_at, passes):
    model = network()
    snapshot, loss = Snapshot(model), Loss(fails_at)
    Fuse.passes = float("inf") if passes is None else passes
    with pytest.raises(Stop):
        PROBES[name](Probe(model, loss, batches(4)), weights_of(model))
    snapshot.assert_unchanged()


def test_modes_that_the_loss_changes_are_restored():
    model = network()
    snapshot = Snapshot(model)

    def loss(model, batch):
        model.eval()[4].train()
        return Loss()(model, batch)

    Probe(model, loss, batches(1)).gradients(weights_of(model), 1)
    snapshot.assert_unchanged()


@every_probe
def test_results_depend_neither_on_existing_gradients_nor_on_earlier_probes(probe_with):
    """Dropout draws the same masks again, because the random state was restored."""
    model = network()
    probe, weights = Probe(model, Loss(), batches(4)), weights_of(model)
    first = probe_with(probe, weights)
    for p in model.parameters():
        p.grad = None
    with torch.no_grad():  # sparsify calls probes without gradients
        second = probe_with(probe, weights)
    if isinstance(first, tuple):  # `ones` returns inputs
        first, second = first[0], second[0]
    assert first and all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("name", [n for n in PROBES if n != "ones"])
def test_results_share_no_memory_with_the_model(name):
    model = network()
    snapshot, weights = Snapshot(model), weights_of(model)
    for result in PROBES[name](Probe(model, Loss(), batches(4)), weights):
        result.data.fill_(7.0)
    snapshot.assert_unchanged()


# ---- batches


@pytest.mark.parametrize(
    "name, used",
    [
        ("gradients", [0, 1, 2]),
        ("hessian_gradients", [0, 1, 2, 0, 1, 2]),  # g of all batches, then H·g of each
        ("ones", [0]),
        ("synaptic_flow", []),
    ],
)
def test_the_loss_is_called_with_the_first_batches_only(name, used):
    model, data, loss = network(), batches(5), Loss()
    stream = iter(data)
    PROBES[name](Probe(model, loss, stream), weights_of(model))
    assert [next(i for i, b in enumerate(data) if b is s) for s in loss.seen] == used
    assert next(stream) is data[len(set(used))]  # no other batch was drawn


def test_ones_does_not_evaluate_the_model():
    model = network()
    Fuse.passes = 0
    (args, kwargs) = Probe(model, Loss(), batches(1)).ones()
    assert len(args) == 1 and torch.equal(args[0], torch.ones(1, 1, 8, 8)) and kwargs == {}


@every_probe
def test_a_probe_does_not_change_the_order_of_a_shuffling_loader(probe_with):
    model = network()
    images, labels = batches(1, size=40)[0]
    loader = DataLoader(list(zip(images, labels)), batch_size=8, shuffle=True)
    torch.manual_seed(3)
    expected = [y.tolist() for _, y in loader]
    torch.manual_seed(3)
    probe_with(Probe(model, Loss(), loader), weights_of(model))
    assert [y.tolist() for _, y in loader] == expected


@pytest.mark.parametrize("method", ["snip", "grasp", "synflow"])
def test_at_sparsity_0_a_probe_does_not_change_training(method):
    """Dropout, batch norm and shuffling give the same bits."""
    ends = []
    for chosen in (method, "dense"):
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        images, labels = batches(1, size=40)[0]
        loader = DataLoader(list(zip(images, labels)), batch_size=8, shuffle=True)
        torch.manual_seed(3)
        options = dict(sparsity=0.0, epochs=1, steps_per_epoch=5, loss=Loss(), batches=loader)
        optg.sparsify(model, optimizer, chosen, **options)
        ends.append(([step(model, optimizer, batch) for batch in loader], model.state_dict()))
    assert ends[0][0] == ends[1][0]
    assert all(torch.equal(a, b) for a, b in zip(ends[0][1].values(), ends[1][1].values(), strict=True))


# ---- buffers and random state


class Counting(nn.Module):
    """Counts its passes in a buffer that it replaces instead of writing to it."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(64, 10)
        self.register_buffer("passes", torch.zeros(()))

    def forward(self, x):
        self.passes = self.passes + 1
        return self.layer(x.flatten(1))


class Expanded(nn.Module):
    """Has a buffer whose entries share memory, so it cannot be written to."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(64, 10)
        self.register_buffer("offset", torch.zeros(1).expand(10))

    def forward(self, x):
        return self.layer(x.flatten(1)) + self.offset


@pytest.mark.parametrize("make", [Counting, Expanded])
def test_replaced_and_expanded_buffers_are_unchanged(make):
    model = make()
    snapshot = Snapshot(model)
    Probe(model, Loss(), batches(2)).gradients(weights_of(model), 2)
    snapshot.assert_unchanged()


@pytest.mark.parametrize("name", [n for n in PROBES if n != "ones"])
def test_results_need_no_gradient(name):
    model = network()
    assert not any(r.requires_grad for r in PROBES[name](Probe(model, Loss(), batches(3)), weights_of(model)))


def test_pythons_random_state_is_restored():
    model, state = network(), random.getstate()
    augmented = ((x.roll(random.randint(0, 7), -1), y) for x, y in batches(2))
    Probe(model, Loss(), augmented).gradients(weights_of(model), 2)
    now = random.getstate()
    random.setstate(state)
    assert now == state
