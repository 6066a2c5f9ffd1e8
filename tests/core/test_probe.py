"""A probe leaves no trace: what a model holds and how it goes on training are as if nobody had looked."""

import copy
import random

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import optg
from optg.core.probe import Probe
from optg.core.prunable import find_prunable
from optg.core.weights import SparseWeights
from tests.toy import batches, step


class Stop(Exception):
    pass


class Fuse(nn.Module):
    """Lets so many forward passes through, those of the model's copies counted too."""

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
    """Batch norm that learns its statistics and one that does not, dropout, a frozen weight; some gradients are there."""
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
    """Cross-entropy that notes which batches it was asked about; perhaps it fails at one of them."""

    def __init__(self, fails_at: int | None = None):
        self.seen, self.fails_at = [], fails_at

    def __call__(self, model, batch):
        self.seen.append(batch)
        if len(self.seen) == self.fails_at:
            raise Stop
        return nn.functional.cross_entropy(model(batch[0]), batch[1])


def weights_of(model) -> SparseWeights:
    owned = [p for p in model.parameters() if p.requires_grad]
    return SparseWeights(find_prunable(model, None, ()), torch.optim.SGD(owned, lr=0.1), 0.5)


ONES = [torch.ones(1, 1, 8, 8)], {}
PROBES = {
    "gradients": lambda probe, weights: probe.gradients(weights, 3),
    "hessian_gradients": lambda probe, weights: probe.hessian_gradients(weights, 3, 200.0),
    "ones": lambda probe, weights: probe.ones(),
    "synaptic_flow": lambda probe, weights: probe.synaptic_flow(weights, ONES),
}
every_probe = pytest.mark.parametrize("look", PROBES.values(), ids=PROBES)


class Trace:
    """All that a probe could disturb, to be compared with later."""

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
def test_everything_is_as_before(look, training):
    model = network()
    if not training:
        model.eval()
    trace = Trace(model)
    look(Probe(model, Loss(), batches(4)), weights_of(model))
    trace.assert_unchanged()


def test_the_model_of_these_tests_can_be_disturbed():
    model = network()
    trace = Trace(model)
    Loss()(model, batches(1)[0]).backward()
    assert not torch.equal(model[1].running_mean, trace.state["1.running_mean"])
    assert not torch.equal(torch.get_rng_state(), trace.rng)
    assert not torch.equal(model[0].weight.grad, trace.grads[0][1])


@pytest.mark.parametrize(
    "name, fails_at, passes",
    [
        ("gradients", 1, None),  # in the loss, before the model is called
        ("gradients", 2, None),
        ("gradients", None, 0),  # in the model, after some layers
        ("gradients", None, 2),
        ("hessian_gradients", 2, None),
        ("hessian_gradients", 5, None),  # in the second backward's round
        ("hessian_gradients", None, 1),
        ("hessian_gradients", None, 4),
        ("ones", 1, None),
        ("synaptic_flow", None, 0),
    ],
)
def test_everything_is_as_before_when_the_loss_fails(name, fails_at, passes):
    model = network()
    trace, loss = Trace(model), Loss(fails_at)
    Fuse.passes = float("inf") if passes is None else passes
    with pytest.raises(Stop):
        PROBES[name](Probe(model, loss, batches(4)), weights_of(model))
    trace.assert_unchanged()


def test_modes_that_the_loss_changes_are_put_back():
    model = network()
    trace = Trace(model)

    def loss(model, batch):
        model.eval()[4].train()
        return Loss()(model, batch)

    Probe(model, loss, batches(1)).gradients(weights_of(model), 1)
    trace.assert_unchanged()


@every_probe
def test_results_do_not_depend_on_gradients_that_are_there_nor_on_who_asked_before(look):
    """Dropout draws the same masks again, since the random numbers were put back."""
    model = network()
    probe, weights = Probe(model, Loss(), batches(4)), weights_of(model)
    first = look(probe, weights)
    for p in model.parameters():
        p.grad = None
    with torch.no_grad():  # as sparsify asks
        second = look(probe, weights)
    if isinstance(first, tuple):  # the inputs of `ones`
        first, second = first[0], second[0]
    assert first and all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("name", [n for n in PROBES if n != "ones"])
def test_results_share_no_memory_with_the_model(name):
    model = network()
    trace, weights = Trace(model), weights_of(model)
    for result in PROBES[name](Probe(model, Loss(), batches(4)), weights):
        result.data.fill_(7.0)
    trace.assert_unchanged()


# ---- which batches


@pytest.mark.parametrize(
    "name, asked",
    [
        ("gradients", [0, 1, 2]),
        ("hessian_gradients", [0, 1, 2, 0, 1, 2]),  # g of all, then H·g of each
        ("ones", [0]),
        ("synaptic_flow", []),
    ],
)
def test_the_loss_is_asked_about_the_first_batches_only(name, asked):
    model, data, loss = network(), batches(5), Loss()
    stream = iter(data)
    PROBES[name](Probe(model, loss, stream), weights_of(model))
    assert [next(i for i, b in enumerate(data) if b is s) for s in loss.seen] == asked
    assert next(stream) is data[len(set(asked))]  # and no more were taken than needed


def test_ones_does_not_evaluate_the_model():
    model = network()
    Fuse.passes = 0
    (args, kwargs) = Probe(model, Loss(), batches(1)).ones()
    assert len(args) == 1 and torch.equal(args[0], torch.ones(1, 1, 8, 8)) and kwargs == {}


@every_probe
def test_a_shuffling_loader_gives_the_same_epochs_as_without_a_probe(look):
    model = network()
    images, labels = batches(1, size=40)[0]
    loader = DataLoader(list(zip(images, labels)), batch_size=8, shuffle=True)
    torch.manual_seed(3)
    expected = [y.tolist() for _, y in loader]
    torch.manual_seed(3)
    look(Probe(model, Loss(), loader), weights_of(model))
    assert [y.tolist() for _, y in loader] == expected


@pytest.mark.parametrize("method", ["snip", "grasp", "synflow"])
def test_at_sparsity_0_training_goes_on_as_if_nobody_had_looked(method):
    """Dropout, batch norm and shuffling, bit for bit."""
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


# ---- what easily leaves a trace


class Counting(nn.Module):
    """Counts its passes in a buffer that it does not write to but replaces."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(64, 10)
        self.register_buffer("passes", torch.zeros(()))

    def forward(self, x):
        self.passes = self.passes + 1
        return self.layer(x.flatten(1))


class Expanded(nn.Module):
    """Has a buffer whose entries share their memory, so that it cannot be written to."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(64, 10)
        self.register_buffer("offset", torch.zeros(1).expand(10))

    def forward(self, x):
        return self.layer(x.flatten(1)) + self.offset


@pytest.mark.parametrize("make", [Counting, Expanded])
def test_buffers_of_all_kinds(make):
    model = make()
    trace = Trace(model)
    Probe(model, Loss(), batches(2)).gradients(weights_of(model), 2)
    trace.assert_unchanged()


@pytest.mark.parametrize("name", [n for n in PROBES if n != "ones"])
def test_results_carry_no_graph(name):
    model = network()
    assert not any(r.requires_grad for r in PROBES[name](Probe(model, Loss(), batches(3)), weights_of(model)))


def test_random_numbers_of_python():
    model, state = network(), random.getstate()
    augmented = ((x.roll(random.randint(0, 7), -1), y) for x, y in batches(2))
    Probe(model, Loss(), augmented).gradients(weights_of(model), 2)
    now = random.getstate()
    random.setstate(state)
    assert now == state
