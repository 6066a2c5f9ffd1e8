"""What a user's training loop may look like, and what the sparsifier answers."""

import copy
import gc
import inspect
import pickle
import warnings

import pytest
import torch
from rich.console import Console
from torch import nn

import optg
from optg.methods import ACDC, GMP, STR, Feather, OptG, RigL
from tests.toy import batches, convnet, entropy, step

EPOCHS, STEPS = 4, 5
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


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 32, bias=False), nn.ReLU(), nn.Linear(32, 10, bias=False))


def attach(model, optimizer=None, method="optg", sparsity=0.9, **patterns):
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-3)
    return optimizer, optg.sparsify(
        model, optimizer, method, sparsity=sparsity, epochs=EPOCHS, steps_per_epoch=STEPS, **patterns
    )


def zeros(model) -> int:
    return sum(int((p == 0).sum()) for p in model.parameters() if p.ndim > 1)


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


# ---- optimizers


@pytest.mark.parametrize("cls, options", VARIANTS)
def test_every_torch_optimizer(cls, options):
    model = mlp() if cls.__name__ == "Muon" else convnet()
    optimizer, sparsifier = attach(model, cls(model.parameters(), **{"lr": 1e-3, **options}))
    first = [p.detach().clone() for p in model.parameters()]
    for batch in batches(EPOCHS * STEPS):
        step(model, optimizer, batch)
    assert zeros(model) == sum(int((~m).sum()) for m in sparsifier.masks.values()) == int(-(-sparsifier.weights.size * 9 // 10))
    assert all(not torch.equal(a, b) for a, b in zip(first, model.parameters()))


def test_a_closure_is_evaluated_on_effective_weights():
    model = convnet()
    optimizer, sparsifier = attach(model)
    model2 = copy.deepcopy(model)
    optimizer2, _ = attach(model2)
    for style, (x, y) in enumerate(batches(EPOCHS * STEPS)):

        def closure(x=x, y=y):
            assert torch.is_grad_enabled()
            for value, mask in zip(sparsifier.weights.values, sparsifier.weights.masks):
                assert not value[~mask].any()
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            return loss

        loss = optimizer.step(closure) if style % 2 else optimizer.step(closure=closure)
        assert loss.item() == step(model2, optimizer2, (x, y))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), model2.parameters()))


def test_an_optimizer_that_evaluates_the_closure_elsewhere_is_refused():
    class Sharp(torch.optim.SGD):
        """Takes the gradient at weights that it has moved, as SAM does."""

        def step(self, closure):
            with torch.no_grad():
                for p in model.parameters():
                    p.add_(0.01 * p.grad)
            loss = closure()
            super().step()
            return loss

    model = convnet()
    optimizer, _ = attach(model, Sharp(model.parameters(), lr=0.1))
    batch = batches(1)[0]
    entropy(model, batch).backward()
    with pytest.raises(RuntimeError, match="Sharp evaluates the model again after moving its weights"):
        optimizer.step(lambda: entropy(model, batch))


def test_a_compiled_optimizer_step():
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
    assert zeros(model) == int((~torch.cat([m.flatten() for m in sparsifier.masks.values()])).sum()) > 0.9 * 2368


def test_gradient_accumulation_counts_optimizer_steps():
    model = convnet()
    optimizer, sparsifier = attach(model)
    for i, (x, y) in enumerate(batches(12)):
        (nn.functional.cross_entropy(model(x), y) / 3).backward()
        if i % 3 == 2:
            optimizer.step()
            optimizer.zero_grad()
    assert sparsifier.clock.step == 4


def test_schedulers_reach_the_scores():
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


# ---- precision


def test_bfloat16_parameters_have_float32_scores():
    model = convnet(norm=False).bfloat16()
    optimizer, sparsifier = attach(model)
    for x, y in batches(EPOCHS * STEPS):
        step(model, optimizer, (x.bfloat16(), y))
    assert {s.dtype for kind in sparsifier.method.state.values() for s in kind} == {torch.float32}
    assert {v.dtype for v in sparsifier.weights.values} == {torch.bfloat16}
    scores = sparsifier.method.state["scores"]
    scores[0].zero_()
    for _ in range(2000):
        scores[0].sub_(1e-3)
    assert float(scores[0].mean()) == pytest.approx(-2.0, rel=1e-3)  # in bfloat16 this sum ends at 0.5


def test_bfloat16_autocast():
    model = convnet()
    optimizer, sparsifier = attach(model)
    for x, y in batches(EPOCHS * STEPS):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
    assert sparsifier.sparsity >= 0.9


@pytest.mark.parametrize("unscale_first", [False, True])
@pytest.mark.parametrize("fused", [False, True])
def test_a_grad_scaler_changes_nothing_but_the_skipped_steps(fused, unscale_first):
    data = batches(EPOCHS * STEPS)
    model = convnet()
    plain = copy.deepcopy(model)
    optimizer, sparsifier = attach(model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, fused=fused))
    plain_optimizer, plain_sparsifier = attach(plain, torch.optim.SGD(plain.parameters(), lr=0.05, momentum=0.9, fused=fused))
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)  # a power of two: scaling and back is exact
    for i, (x, y) in enumerate(data):
        broken = i == 7
        before = copy.deepcopy(sparsifier.method.state)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        scaler.scale(loss * torch.inf if broken else loss).backward()
        if unscale_first:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        if broken:
            assert all(torch.equal(a, b) for k in before for a, b in zip(before[k], sparsifier.method.state[k]))
            if not fused:  # the optimizer was never called; a fused one was, and its step counts
                sparsifier.advance()
            plain_sparsifier.advance()
        else:
            step(plain, plain_optimizer, (x, y))
        model.load_state_dict(plain.state_dict()) if broken else None  # batch norm has seen the broken batch
    assert sparsifier.clock.step == plain_sparsifier.clock.step == EPOCHS * STEPS
    for a, b in zip(model.parameters(), plain.parameters()):
        assert torch.allclose(a, b, atol=1e-6)
    for a, b in zip(sparsifier.masks.values(), plain_sparsifier.masks.values()):
        assert torch.equal(a, b)


# ---- models


def test_channels_last_gives_the_same_masks():
    plain = convnet().double()
    last = copy.deepcopy(plain).to(memory_format=torch.channels_last)
    (opt_a, a), (opt_b, b) = attach(plain), attach(last)
    for x, y in batches(EPOCHS * STEPS, dtype=torch.float64):
        step(plain, opt_a, (x, y))
        step(last, opt_b, (x.to(memory_format=torch.channels_last), y))
    assert b.weights.masks[1].is_contiguous(memory_format=torch.channels_last)
    for x, y in zip(a.masks.values(), b.masks.values()):
        assert torch.equal(x, y)


class Everything(nn.Module):
    """Layers of every kind in one forward, a tied weight, a frozen layer and one that takes no part."""

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
        self.idle = nn.Linear(8, 8)
        self.head = nn.Linear(8, 10)

    def forward(self, x):
        x = self.up(self.depthwise(self.conv3(x[:, :, None])[:, :, 0]))
        x = self.conv1(x.flatten(2)).transpose(1, 2)
        x = self.attention(x, x, x, need_weights=False)[0]
        return self.head(self.frozen(self.second(self.first(x).relu())).mean(1))


@pytest.mark.parametrize("method", ["optg", "gmp", optg.methods.RigL(every=3)])
def test_all_kinds_of_layers(method):
    model = Everything()
    frozen, idle = model.frozen.weight.clone(), model.idle.weight.clone()
    optimizer, sparsifier = attach(model, torch.optim.AdamW(model.parameters(), lr=0.01), method)
    for batch in batches(EPOCHS * STEPS):
        step(model, optimizer, batch)
    assert sparsifier.sparsity >= 0.9
    assert "frozen.weight" not in sparsifier.masks and torch.equal(model.frozen.weight, frozen)
    assert "second.weight" not in sparsifier.masks and model.second.weight is model.first.weight
    assert torch.equal(model.idle.weight, torch.where(sparsifier.masks["idle.weight"], idle, 0.0))


def test_a_copy_of_the_model_is_a_plain_model():
    model = convnet()
    optimizer, _ = attach(model)
    for batch in batches(EPOCHS * STEPS):
        step(model, optimizer, batch)
    twin = copy.deepcopy(model)
    assert list(twin.state_dict()) == list(convnet().state_dict())
    x = batches(1)[0][0]
    model.eval(), twin.eval()
    assert torch.equal(twin(x), model(x)) and zeros(twin) == zeros(model)


def test_kept_weights_written_from_outside_count():
    model = convnet()
    optimizer, sparsifier = attach(model)
    for batch in batches(13):
        step(model, optimizer, batch)
    latent = [v.clone() for v in sparsifier.weights.latent]
    other = {n: torch.full_like(t, 0.01) if t.ndim > 1 else t for n, t in model.state_dict().items()}
    model.load_state_dict(other)  # dense: fills removed weights too
    optimizer.param_groups[0]["lr"] = 0.0
    step(model, optimizer, batches(1)[0])
    for value, mask, now, before in zip(sparsifier.weights.values, sparsifier.weights.masks, sparsifier.weights.latent, latent):
        assert torch.equal(value, torch.where(mask, 0.01, 0.0))
        assert torch.equal(now[~mask], before[~mask])
    model.load_state_dict(other)
    sparsifier.reload()  # now removed weights too
    for value, mask, now in zip(sparsifier.weights.values, sparsifier.weights.masks, sparsifier.weights.latent):
        assert torch.equal(value, torch.where(mask, 0.01, 0.0)) and torch.equal(now, torch.full_like(now, 0.01))


def test_the_caller_need_not_keep_the_sparsifier():
    model = convnet()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    optg.sparsify(model, optimizer, sparsity=0.9, epochs=EPOCHS, steps_per_epoch=STEPS)
    gc.collect()
    for batch in batches(EPOCHS * STEPS):
        step(model, optimizer, batch)
    assert zeros(model) >= 0.9 * 1928


def test_two_sparsifiers_from_one_method_instance_are_apart():
    method = OptG(alpha=2.0)
    (_, a), (_, b) = attach(convnet(), method=method), attach(convnet(), method=method)
    assert a.method == b.method == method and a.method is not b.method is not method
    assert a.method.state["scores"][0] is not b.method.state["scores"][0] and not method.state


def test_state_moves_between_wrapped_and_bare_models():
    model = convnet()
    optimizer, sparsifier = attach(torch.compile(model, backend="eager"))
    for batch in batches(13):
        step(model, optimizer, batch)
    bare = convnet()
    _, other = attach(bare)
    bare.load_state_dict(model.state_dict())
    other.load_state_dict(copy.deepcopy(sparsifier.state_dict()))
    assert list(other.masks) == ["0.weight", "4.weight", "7.weight"]
    assert all(torch.equal(a, b) for a, b in zip(other.masks.values(), sparsifier.masks.values()))
    assert other.weights.counts.tolist() == sparsifier.weights.counts.tolist()


# ---- answers


def text(table) -> str:
    console = Console(width=120, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(table)
    return console.export_text()


def test_summary_shows_each_layer_and_the_last_cut():
    model = convnet()
    optimizer, sparsifier = attach(model)
    for batch in batches(EPOCHS * STEPS):
        step(model, optimizer, batch)
    shown = text(sparsifier.summary())
    assert "optg, step 20 of 20" in shown
    assert "4.weight" in shown and "8×8×3×3" in shown
    kept = 1928 - 1736
    assert f"{kept / 1928:.2%}" in shown
    removed, revived = sparsifier.weights.counts.sum(0)[1:].tolist()
    assert removed >= revived > 0


def test_clip_grad_norm_measures_what_weights_receive():
    model = mlp()
    optimizer, sparsifier = attach(model)
    for batch in batches(EPOCHS * STEPS):
        step(model, optimizer, batch)
    x, y = batches(1)[0]
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(x), y).backward()
    received = [p.grad * sparsifier.masks.get(n, True) for n, p in model.named_parameters()]
    expected = torch.cat([g.flatten() for g in received]).norm()
    dense = torch.cat([p.grad.flatten() for p in model.parameters()])
    assert sparsifier.clip_grad_norm_(1e9) == pytest.approx(float(expected))
    assert expected < 0.7 * dense.norm()
    sparsifier.clip_grad_norm_(float(expected) / 4)
    clipped = torch.cat([p.grad.flatten() for p in model.parameters()])
    assert torch.allclose(clipped, dense / 4, rtol=1e-4)
    mask = sparsifier.masks["1.weight"]
    model[1].weight.grad[~mask] = torch.inf  # whatever a removed weight has, nobody receives it
    assert sparsifier.clip_grad_norm_(1e9) == pytest.approx(float(expected) / 4, rel=1e-4)
    assert model[1].weight.grad[mask].isfinite().all()


def test_apply_masks_makes_averages_sparse():
    model = convnet()
    optimizer, sparsifier = attach(model)
    ema = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))
    for batch in batches(EPOCHS * STEPS):
        step(model, optimizer, batch)
        ema.update_parameters(model)
    assert zeros(ema) < zeros(model)
    sparsifier.apply_masks(copy.deepcopy(ema).to("meta"))  # on another device
    sparsifier.apply_masks(ema)
    assert zeros(ema) >= zeros(model)
    with pytest.raises(ValueError, match=r"the other model has no 0\.weight of shape \(8, 1, 3, 3\)"):
        sparsifier.apply_masks(mlp())


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
    assert f"{1928 - 1736:,}" in text(sparsifier.summary())
    step(model, optimizer, batches(1)[0])
    assert zeros(model) < 1736  # ordinary training again
    attach(model, optimizer)  # and it may begin anew


def test_finishing_early_cuts_to_the_target_and_says_why():
    model = convnet()
    optimizer, sparsifier = attach(model)
    for batch in batches(7):
        step(model, optimizer, batch)
    with pytest.warns(UserWarning) as caught:
        sparsifier.finish()
    [warning] = caught
    for part in ("7 optimizer steps were seen", "20 were announced", "steps_per_epoch=5, which counts optimizer steps"):
        assert part in str(warning.message)
    assert zeros(model) == 1736 and sparsifier.sparsity == 1736 / 1928


def test_finish_says_where_a_learned_sparsity_has_led():
    model = convnet()
    optimizer, sparsifier = attach(model, method=STR())
    for batch in batches(EPOCHS * STEPS):
        step(model, optimizer, batch)
    with pytest.warns(UserWarning, match=r"ended at sparsity 0\.0000, not 0\.9: str learns its sparsity, .*decay=None"):
        sparsifier.finish()


def test_stepping_past_the_end_warns_once_and_keeps_the_mask():
    model = convnet()
    optimizer, sparsifier = attach(model, method=GMP(every=2))
    for batch in batches(EPOCHS * STEPS):
        step(model, optimizer, batch)
    masks = [m.clone() for m in sparsifier.masks.values()]
    with pytest.warns(UserWarning, match="optimizer step 21, but 20 were announced") as caught:
        for batch in batches(5):
            step(model, optimizer, batch)
    assert len(caught) == 1
    assert all(torch.equal(a, b) for a, b in zip(masks, sparsifier.masks.values()))
    assert zeros(model) == 1736


# ---- bad input


def unchanged(model, before):
    return all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), before.values()))


@pytest.mark.parametrize(
    "options, error, message",
    [
        ({"sparsity": 1.0}, ValueError, "sparsity is 1.0; expected the share of weights to remove, at least 0 and below 1"),
        ({"sparsity": -0.1}, ValueError, "sparsity is -0.1"),
        ({"sparsity": 95}, ValueError, "sparsity is 95"),
        ({"sparsity": float("nan")}, ValueError, "sparsity is nan"),
        ({"sparsity": "0.9"}, ValueError, "sparsity is '0.9'; expected the share of weights"),
        ({"exclude": None}, TypeError, "None is not a pattern; expected a module class or the name of a layer"),
        ({"include": [nn.ReLU()]}, TypeError, "ReLU() is not a pattern"),
        ({"method": "optgg"}, ValueError, "unknown method 'optgg'; did you mean 'optg'? Known: dense, snip, grasp,"),
        ({"method": "dense"}, ValueError, "dense training removes nothing; sparsity is 0.9, expected 0"),
        ({"include": "features.*"}, ValueError, "the pattern 'features.*' matches no prunable weight"),
        ({"exclude": "0.bias"}, ValueError, "biases, norms and frozen parameters are never pruned"),
        ({"exclude": "*"}, ValueError, "the model has no prunable weight"),
        ({"method": None}, TypeError, "method is None; expected the name or an instance of a method"),
        ({"method": OptG}, TypeError, "expected the name or an instance of a method"),
    ],
)
def test_bad_arguments_are_refused_and_change_nothing(options, error, message):
    model = convnet()
    before = copy.deepcopy(model.state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(error) as caught:
        attach(model, optimizer, **options)
    assert message in str(caught.value)
    assert unchanged(model, before) and not optimizer._optimizer_step_pre_hooks
    attach(model, optimizer)  # it can still be done right


@pytest.mark.parametrize(
    "method, field, value",
    [
        (GMP, "schedule", "cubik"), (GMP, "budget", "erc"), (GMP, "end", 1.5), (GMP, "every", 0), (GMP, "start", 0.9),
        (OptG, "alpha", 0.0), (OptG, "alpha", -1.0), (RigL, "fraction", 1.5), (RigL, "fraction", -0.5), (Feather, "power", 0.0),
        (ACDC, "start", 1.5), (ACDC, "phase", -1.0), (ACDC, "final", 2.0),
    ],
)  # fmt: skip
def test_bad_method_options_are_refused(method, field, value):
    with pytest.raises(ValueError, match=field):
        method(**{field: value})


def test_weights_the_optimizer_does_not_own_are_named():
    model = convnet()
    with pytest.raises(ValueError, match=r"the optimizer does not own 4\.weight, 7\.weight: give it these parameters, freeze"):
        attach(model, torch.optim.SGD(model[0].parameters(), lr=0.1))
    attach(model, torch.optim.SGD(model[0].parameters(), lr=0.1), exclude=["4", "7"])


def test_lbfgs_and_sparse_adam_are_refused_with_the_reason():
    model = convnet()
    with pytest.raises(TypeError, match="LBFGS cannot train a sparse model: it evaluates the model many times inside one step"):
        attach(model, torch.optim.LBFGS(model.parameters()))
    with pytest.raises(TypeError, match="SparseAdam cannot train a sparse model: it accepts sparse gradients only"):
        attach(model, torch.optim.SparseAdam(model.parameters()))


@pytest.mark.parametrize("method", ["optg", "supermask", "str", "gmp", "rigl"])
def test_a_loss_that_rises_is_refused_where_its_gradient_has_a_say(method):
    model = convnet()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, maximize=True)
    if method in ("optg", "supermask", "str"):
        with pytest.raises(ValueError, match=r"maximize=True: .* Minimize its negative"):
            attach(model, optimizer, method)
    else:
        attach(model, optimizer, method)


def test_one_optimizer_has_one_sparsifier():
    model = convnet()
    optimizer, _ = attach(model)
    with pytest.raises(ValueError, match="has a sparsifier already"):
        attach(model, optimizer)


def finished_state():
    _, sparsifier = attach(convnet())
    with pytest.warns(UserWarning, match="training ended at sparsity"):
        sparsifier.finish()
    return sparsifier.state_dict()


def test_a_state_of_another_model_changes_nothing():
    model, other = convnet(), mlp()
    optimizer, sparsifier = attach(model)
    for batch in batches(13):
        step(model, optimizer, batch)
    before = copy.deepcopy((model.state_dict(), sparsifier.state_dict()))
    wrong_shape = copy.deepcopy(sparsifier.state_dict())
    wrong_shape["tensors"]["latent"]["7.weight"] = torch.zeros(3, 3)
    states = {
        r"belongs to another model: only this model has 0\.weight \(masks\)": attach(other)[1].state_dict(),
        r"7\.weight \(latent\) has the shape \(3, 3\) in the state, \(10, 128\) here": wrong_shape,
        r"saved with method='gmp', here it is 'optg'": attach(convnet(), method="gmp")[1].state_dict(),
        r"saved with sparsity=0\.5, here it is 0\.9": attach(convnet(), sparsity=0.5)[1].state_dict(),
        r"this is not a sparsifier state: it has no 'method'": model.state_dict(),
        r"the state has no scores: it was saved after finish\(\)": finished_state(),
    }
    for message, state in states.items():
        with pytest.raises(ValueError, match=message):
            sparsifier.load_state_dict(state)
    assert unchanged(model, before[0])
    after = sparsifier.state_dict()
    assert after["step"] == 13
    for kind, layers in before[1]["tensors"].items():
        assert all(torch.equal(t, after["tensors"][kind][n]) for n, t in layers.items())


def test_a_copy_that_would_train_dense_is_refused():
    model = convnet()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sparsifier = optg.sparsify(model, optimizer, "gmp", sparsity=0.5, epochs=2, steps_per_epoch=2)
    copy.deepcopy(model)
    with pytest.raises(TypeError, match=r"cannot be copied or pickled: .* load_state_dict"):
        copy.deepcopy((model, optimizer, sparsifier))
    with pytest.raises(TypeError, match=r"cannot be copied or pickled"):
        pickle.dumps([model, optimizer, sparsifier])
    assert sparsifier.clip_grad_norm_(1.0) == 0  # of no gradients, as torch's


@pytest.mark.parametrize("method", ["optg", "dpf", "feather", "gmp", "rigl"])
def test_a_model_may_change_its_number_type(method):
    model = convnet()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    sparsifier = optg.sparsify(model, optimizer, method, sparsity=0.8, epochs=3, steps_per_epoch=4)
    model.bfloat16()
    for batch in batches(12, dtype=torch.bfloat16):
        step(model, optimizer, batch)
    assert sparsifier.sparsity == pytest.approx(0.8, abs=1e-3)
    for name, mask in sparsifier.masks.items():
        assert not model.get_parameter(name)[~mask].any()
