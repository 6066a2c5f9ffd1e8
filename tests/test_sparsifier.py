"""A user's training loop with a sparsifier: any optimizer, any model, compiled or not, up to finish()."""

import copy
import gc
import inspect
import pickle
import warnings

import pytest
import torch
from torch import nn

import optg
from optg.methods import OptG
from tests.toy import EPOCHS, STEPS, attach, batches, convnet, count_zeros, mlp, printed, step

CLASSES = [
    cls
    for _, cls in inspect.getmembers(torch.optim, inspect.isclass)
    if issubclass(cls, torch.optim.Optimizer) and cls not in (torch.optim.Optimizer, torch.optim.LBFGS, torch.optim.SparseAdam)
]
VARIANTS = [
    pytest.param(cls, {flag: value}, id=f"{cls.__name__}-{flag}={value}")
    for cls in CLASSES
    for flag, value in (("foreach", True), ("foreach", False), ("fused", True), ("lr", 0.01))
    if flag in inspect.signature(cls).parameters
]


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


# ---- optimizers


@pytest.mark.parametrize("cls, options", VARIANTS)
def test_every_torch_optimizer_reaches_the_target(cls, options):
    model = mlp() if cls.__name__ == "Muon" else convnet()
    optimizer, sparsifier = attach(model, cls(model.parameters(), **{"lr": 1e-3, **options}))
    first = [p.detach().clone() for p in model.parameters()]
    for batch in batches(EPOCHS * STEPS):
        step(model, optimizer, batch)
    assert (
        count_zeros(model)
        == sum(int((~m).sum()) for m in sparsifier.masks.values())
        == int(-(-sparsifier.weights.size * 9 // 10))
    )
    assert all(not torch.equal(a, b) for a, b in zip(first, model.parameters()))


def test_a_compiled_optimizer_step_gives_the_same_masks():
    model = convnet()
    optimizer, sparsifier = attach(model, torch.optim.AdamW(model.parameters(), lr=torch.tensor(1e-3)))
    plain = copy.deepcopy(model)
    plain_optimizer, plain_sparsifier = attach(plain, torch.optim.AdamW(plain.parameters(), lr=torch.tensor(1e-3)))
    compiled = torch.compile(optimizer.step, backend="eager")
    for x, y in batches(EPOCHS * STEPS):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        compiled()
        step(plain, plain_optimizer, (x, y))
    assert sparsifier.clock.step == EPOCHS * STEPS
    for a, b in zip(sparsifier.masks.values(), plain_sparsifier.masks.values()):
        assert torch.equal(a, b)


def test_inductor_compiles_the_model_once():
    torch._dynamo.reset()
    model = mlp()
    optimizer, sparsifier = attach(model)
    compiled = torch.compile(model, fullgraph=True)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for batch in batches(EPOCHS * STEPS):
            step(compiled, optimizer, batch)
    assert count_zeros(model) == int((~torch.cat([m.flatten() for m in sparsifier.masks.values()])).sum()) > 0.9 * 2368


def test_gradient_accumulation_counts_optimizer_steps():
    model = convnet()
    optimizer, sparsifier = attach(model)
    for i, (x, y) in enumerate(batches(12)):
        (nn.functional.cross_entropy(model(x), y) / 3).backward()
        if i % 3 == 2:
            optimizer.step()
            optimizer.zero_grad()
    assert sparsifier.clock.step == 4


def test_scores_follow_the_learning_rate_schedule():
    model = mlp()
    optimizer, sparsifier = attach(model)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 1.0 if epoch == 0 else 0.0)
    scores = sparsifier.method.state["scores"]
    step(model, optimizer, batches(1)[0])
    before = [s.clone() for s in scores]
    assert all(s.any() for s in scores)
    scheduler.step()
    step(model, optimizer, batches(1)[0])
    assert all(torch.equal(a, b) for a, b in zip(before, scores))


# ---- models


class EveryLayer(nn.Module):
    """Layers of every kind, a tied weight, a frozen layer and an unused one."""

    def __init__(self):
        super().__init__()
        self.conv3 = nn.Conv3d(1, 4, (1, 3, 3), padding=(0, 1, 1))
        self.depthwise = nn.Conv2d(4, 4, 3, padding=1, groups=4)
        self.up = nn.ConvTranspose2d(4, 4, 2, stride=2)
        self.conv1 = nn.Conv1d(4, 8, 4, stride=4)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.first = nn.Linear(8, 8)
        self.second = nn.Linear(8, 8)
        self.second.weight = self.first.weight
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.unused = nn.Linear(8, 8)
        self.head = nn.Linear(8, 10)

    def forward(self, x):
        x = self.up(self.depthwise(self.conv3(x[:, :, None])[:, :, 0]))
        x = self.conv1(x.flatten(2)).transpose(1, 2)
        x = self.attention(x, x, x, need_weights=False)[0]
        return self.head(self.frozen(self.second(self.first(x).relu())).mean(1))


@pytest.mark.parametrize("method", ["optg", "gmp", optg.methods.RigL(every=3)])
def test_every_kind_of_layer(method):
    model = EveryLayer()
    frozen, unused = model.frozen.weight.clone(), model.unused.weight.clone()
    optimizer, sparsifier = attach(model, torch.optim.AdamW(model.parameters(), lr=0.01), method)
    for batch in batches(EPOCHS * STEPS):
        step(model, optimizer, batch)
    assert sparsifier.sparsity >= 0.9
    assert "frozen.weight" not in sparsifier.masks and torch.equal(model.frozen.weight, frozen)
    assert "second.weight" not in sparsifier.masks and model.second.weight is model.first.weight
    assert torch.equal(model.unused.weight, torch.where(sparsifier.masks["unused.weight"], unused, 0.0))


def test_a_copy_of_the_model_is_a_plain_model():
    model = convnet()
    optimizer, _ = attach(model)
    for batch in batches(EPOCHS * STEPS):
        step(model, optimizer, batch)
    twin = copy.deepcopy(model)
    assert list(twin.state_dict()) == list(convnet().state_dict())
    x = batches(1)[0][0]
    model.eval(), twin.eval()
    assert torch.equal(twin(x), model(x)) and count_zeros(twin) == count_zeros(model)


@pytest.mark.parametrize("method", ["optg", "dpf", "feather", "gmp", "rigl"])
def test_a_model_may_change_its_dtype_after_sparsify(method):
    model = convnet()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    sparsifier = optg.sparsify(model, optimizer, method, sparsity=0.8, epochs=3, steps_per_epoch=4)
    model.bfloat16()
    for batch in batches(12, dtype=torch.bfloat16):
        step(model, optimizer, batch)
    assert sparsifier.sparsity == pytest.approx(0.8, abs=1e-3)
    for name, mask in sparsifier.masks.items():
        assert not model.get_parameter(name)[~mask].any()


# ---- sparsifiers


@pytest.mark.parametrize("method", ["optg", "gmp", "dpf", "str", "feather", "st3", "st3-sigma"])
def test_a_pretrained_model_may_be_loaded_after_sparsify(method):
    """DDP's first broadcast writes to the model in the same way."""
    results = []
    for late in (False, True):
        torch.manual_seed(1)
        model, pretrained = convnet(), convnet().state_dict()
        if not late:
            model.load_state_dict(pretrained)
        optimizer, sparsifier = attach(model, method=method)
        if late:
            model.load_state_dict(pretrained)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for batch in batches(EPOCHS * STEPS):
                step(model, optimizer, batch)
            sparsifier.finish()
        results.append(model.state_dict())
    for name, value in results[0].items():
        assert torch.equal(value, results[1][name]), name


def test_the_caller_does_not_need_to_keep_the_sparsifier():
    model = convnet()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    optg.sparsify(model, optimizer, sparsity=0.9, epochs=EPOCHS, steps_per_epoch=STEPS)
    gc.collect()
    for batch in batches(EPOCHS * STEPS):
        step(model, optimizer, batch)
    assert count_zeros(model) >= 0.9 * 1928


def test_two_sparsifiers_made_from_one_method_share_no_state():
    method = OptG(alpha=2.0)
    (_, a), (_, b) = attach(convnet(), method=method), attach(convnet(), method=method)
    assert a.method == b.method == method and a.method is not b.method is not method
    assert a.method.state["scores"][0] is not b.method.state["scores"][0] and not method.state


def test_a_second_sparsifier_for_one_optimizer_is_refused():
    model = convnet()
    optimizer, _ = attach(model)
    with pytest.raises(ValueError, match="has a sparsifier already"):
        attach(model, optimizer)


def test_a_sparsifier_cannot_be_copied_or_pickled():
    model = convnet()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sparsifier = optg.sparsify(model, optimizer, "gmp", sparsity=0.5, epochs=2, steps_per_epoch=2)
    copy.deepcopy(model)  # the model alone may be copied
    with pytest.raises(TypeError, match=r"cannot be copied or pickled: .* load_state_dict"):
        copy.deepcopy((model, optimizer, sparsifier))
    with pytest.raises(TypeError, match=r"cannot be copied or pickled"):
        pickle.dumps([model, optimizer, sparsifier])


# ---- the end


def test_finish_leaves_a_plain_model_and_readable_masks():
    model = convnet()
    optimizer, sparsifier = attach(model)
    for batch in batches(EPOCHS * STEPS):
        step(model, optimizer, batch)
    masks = {n: m.clone() for n, m in sparsifier.masks.items()}
    before = copy.deepcopy(model.state_dict())
    with warnings.catch_warnings(action="error"):
        sparsifier.finish()
        sparsifier.finish()
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), before.values()))
    assert all(torch.equal(masks[n], m) for n, m in sparsifier.masks.items())
    assert f"{1928 - 1736:,}" in printed(sparsifier.summary())
    step(model, optimizer, batches(1)[0])
    assert count_zeros(model) < 1736  # ordinary training again
    attach(model, optimizer)  # and the optimizer may get a new sparsifier
