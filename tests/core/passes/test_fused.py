"""Every fused pass against its reference: on a GPU, or in Triton's interpreter on CPU tensors (TRITON_INTERPRET=1)."""

import os
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import optg
from optg.core import passes
from optg.core.masks import keep_top
from optg.core.passes import reference
from optg.core.passes.reference import SoftThreshold
from optg.methods import METHODS, Method
from tests.toy import entropy, goal

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if not torch.cuda.is_available() and not INTERPRETED:
    pytest.skip("needs a CUDA GPU or TRITON_INTERPRET=1", allow_module_level=True)
module = pytest.importorskip("optg.core.passes.fused")
tables = pytest.importorskip("optg.core.passes.tables")
DEVICE = "cpu" if INTERPRETED else "cuda"
STEPS = 12 if INTERPRETED else 24  # of a run; the interpreter is slow
fused = module.Passes()
needs_cuda = pytest.mark.skipif(INTERPRETED, reason="needs a CUDA GPU")


@pytest.fixture(autouse=True)
def fused_on_this_device(monkeypatch):
    torch.manual_seed(0)
    monkeypatch.setitem(passes.BACKENDS, DEVICE, "optg.core.passes.fused")


# ---- each pass by itself

SHAPES = (3, 8, 3, 3), (16, 30), (2, 5), (1, 9000)


def lists(dtype: torch.dtype, layout: str) -> SimpleNamespace:
    """Random values, masks, latent weights, gradients, momenta and scores of four layers."""

    def draw(dtype: torch.dtype = dtype) -> list[torch.Tensor]:
        drawn = [torch.randn(shape, device=DEVICE).to(dtype) for shape in SHAPES]
        if layout == "channels_last":
            drawn[0] = drawn[0].to(memory_format=torch.channels_last)
        return drawn

    masks = [torch.empty_like(v, dtype=torch.bool).copy_(torch.rand(v.shape) > 0.4) for v in draw()]
    made = SimpleNamespace(values=draw(), masks=masks, latent=draw(), grads=draw())
    made.momenta, made.scores = draw(torch.float32), draw(torch.float32)
    made.values[0][0, 0] = torch.nan  # a removed NaN must become 0.0
    made.masks[0][0, 0] = False
    return made


def copied(given: SimpleNamespace) -> SimpleNamespace:
    return SimpleNamespace(**{name: [t.clone() for t in tensors] for name, tensors in vars(given).items()})


PASSES = {
    "restore": lambda p, x: p.restore(x.values, x.masks, x.latent),
    "settle": lambda p, x: p.settle(x.values, x.masks, x.latent),
    "mask": lambda p, x: p.mask(x.grads, x.masks),
    "mask, a share": lambda p, x: p.mask(x.grads, x.masks, 0.5),
    "accumulate": lambda p, x: p.accumulate(
        x.grads, x.masks, x.latent, x.momenta, x.scores, [torch.tensor(0.1 * i, device=DEVICE) for i in range(4)], 0.9, None
    ),
    "accumulate, skipped": lambda p, x: p.accumulate(
        [torch.zeros_like(g) for g in x.grads], x.masks, x.latent, x.momenta, x.scores,
        [torch.tensor(0.0, device=DEVICE) for _ in range(4)], 0.9, torch.tensor(True, device=DEVICE),
    ),
    "sum_signed": lambda p, x: p.sum_signed(x.grads, x.masks, x.latent, torch.float32),
    "keep_above": lambda p, x: p.keep_above(x.masks, x.latent, torch.tensor([0.0, 0.5, 1.0, 9.0], device=DEVICE)),
}  # fmt: skip


@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("name", PASSES)
def test_a_pass_is_the_reference(name, dtype, layout):
    given = lists(dtype, layout)
    expected, got = copied(given), copied(given)
    wanted, returned = PASSES[name](reference, expected), PASSES[name](fused, got)
    close = {"rtol": 1e-5, "atol": 1e-5} if dtype in (torch.float32, torch.float64) else {"rtol": 2e-2, "atol": 2e-2}
    exact = not name.startswith(("accumulate", "sum"))
    for kind, tensors in vars(expected).items():
        for want, have in zip(tensors, getattr(got, kind)):
            if exact:
                assert torch.equal(want.nan_to_num(7.0), have.nan_to_num(7.0)), kind
            else:
                torch.testing.assert_close(have, want, equal_nan=True, **close)
    if wanted is not None:
        torch.testing.assert_close(torch.as_tensor(returned), torch.as_tensor(wanted), rtol=1e-3, atol=0.3 * (not exact))
    if name == "accumulate, skipped":
        assert all(torch.equal(now, before) for now, before in zip(got.scores + got.momenta, given.scores + given.momenta))


@pytest.mark.parametrize("rescale", [False, True])
@pytest.mark.parametrize("power", [1.0, 3.0])
def test_soften_is_the_reference(power, rescale):
    given = lists(torch.float32, "contiguous")
    method = METHODS["st3"](power=power, rescale=rescale)
    method.thresholds = torch.tensor([0.3, 0.0, 0.7, 0.5], device=DEVICE)
    method.state = {"thresholds": list(method.thresholds)}
    for mask, latent, t in zip(given.masks, given.latent, method.thresholds):
        mask.copy_(latent.abs() > t)  # as after a cut
    soft = SoftThreshold(method.thresholds, power, rescale)
    expected, got = copied(given), copied(given)
    for module, lists_ in ((reference, expected), (fused, got)):
        module.soften(lists_.values, lists_.masks, lists_.latent, lambda i, w: method.effective(given, i, w), soft)
    for want, have, mask in zip(expected.values, got.values, given.masks):
        torch.testing.assert_close(have, want, rtol=1e-4, atol=1e-6)
        assert not have[~mask].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("each", [False, True])
def test_thresholds_are_those_of_a_sort(dtype, each):
    scores = [torch.randn(n, device=DEVICE, dtype=dtype) for n in (20_000, 3, 700)]
    scores[0][::3] = 0.0
    scores[2][:600] = -0.0
    for share in (0.1, 0.4, 0.5, 0.9, 1.0):
        zeros = [int(share * len(s)) for s in scores] if each else [int(share * sum(map(len, scores)))]
        cuts = fused.select(scores, zeros if each else zeros[0])
        for cut, zero, group in zip(cuts.on_host(), zeros, scores if each else [torch.cat(scores)]):
            if zero:
                value = group.sort().values[zero - 1]
                assert (cut.value, cut.equal) == (value, int((group == value).sum()))
                assert cut.removed == zero - int((group < value).sum())
    every_third = torch.tensor([7_000, 0, 0, 2, 0, 0, 300, 0, 0], dtype=torch.int32, device=DEVICE)[::3]
    assert [int((~mask).sum()) for mask in keep_top(scores, every_third)] == [7_000, 2, 300]
    scores[1][1] = torch.nan
    with pytest.raises(FloatingPointError, match="tensor 1"):
        keep_top(scores, [1, 1, 1] if each else 1)


@pytest.mark.parametrize("each", [False, True])
def test_ties_go_by_index_in_any_layout(each):
    shapes = (9, 4, 3, 3), (20, 30), (3, 16, 1, 1), (40,), (3, 5, 2, 3, 4), (40, 500)
    scores = [torch.randint(5, shape, device=DEVICE).float() for shape in shapes]
    scores[0], scores[1] = scores[0].to(memory_format=torch.channels_last), scores[1].T.contiguous().T
    scores[4] = scores[4].to(memory_format=torch.channels_last_3d)
    scores[5][:] = 3.0  # more ties than a program reads together
    before = [torch.empty_like(s, dtype=torch.bool).copy_(torch.rand(s.shape) > 0.5) for s in scores]
    total = sum(s.numel() for s in scores)
    for share in (0.13, 0.5, 0.77):
        zeros = [int(share * s.numel()) for s in scores] if each else [int(share * total)]
        cuts = fused.select(scores, zeros if each else zeros[0])
        masks = [b.clone() for b in before]
        counts = fused.write_masks(masks, scores, cuts)
        new = fused.new_masks(scores, cuts)
        for mask, made, old, expected, count in zip(masks, new, before, reference.each_mask(scores, cuts), counts.tolist()):
            assert torch.equal(mask, expected) and torch.equal(made, expected)
            assert count == [int((~mask).sum()), int((old & ~mask).sum()), int((mask & ~old).sum())]


# ---- tables


def test_scores_that_are_not_aligned():
    memory = torch.randn(9001, device=DEVICE)
    assert tables.Tables()([memory[1:]]).align == 1
    masks, threshold = [torch.zeros(9000, dtype=torch.bool, device=DEVICE)], torch.zeros(1, device=DEVICE)
    table = tables.Tables()(masks, [memory[1:]])
    drop = torch.full([1], module.DROP, device=DEVICE)
    counts = module.launch_write(table, torch.float32, threshold, drop, tables.index_maps(masks, True))
    assert torch.equal(masks[0], memory[1:] > 0)
    assert counts.tolist() == [[int((memory[1:] <= 0).sum()), 0, int((memory[1:] > 0).sum())]]


def test_lists_of_different_layouts_have_no_table():
    weight = torch.randn(4, 3, 3, 3, device=DEVICE)
    assert tables.Tables()([weight], [weight.to(memory_format=torch.channels_last)]) is None
    assert tables.Tables()([weight[:, :2]]) is None


def test_a_table_that_a_graph_reads_is_never_dropped(monkeypatch):
    cache, tensors = tables.Tables(), [torch.zeros(64, device=DEVICE) for _ in range(100)]
    captured = tables.Table(torch.zeros(3, 1), torch.zeros(1, 1), 16)
    monkeypatch.setattr(cache, "make", lambda lists, capturing: captured)
    used = cache([tensors[0]])
    cache.captured.append(used)
    monkeypatch.undo()
    for tensor in tensors[1:]:
        cache([tensor])
    assert len(cache.tables) == cache.KEPT and used in cache.captured
    again = cache([tensors[-1]])
    assert cache([tensors[-1]]) is again


# ---- whole runs


def network(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 64, 3), nn.ReLU(), nn.Flatten(), nn.Linear(1024, 5)
    return nn.Sequential(*layers).to(DEVICE, dtype, memory_format=torch.channels_last)  # type: ignore[call-overload]


def images_and_labels(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(8, 3, 8, 8, device=DEVICE, dtype=dtype), torch.arange(8, device=DEVICE) % 5


def short(method: str, every: int) -> Method:
    """Return a method for a run of 30 steps: it cuts often, and STR's threshold starts among the weights."""
    options = {"initial": -5.0} if method == "str" else {"every": every} if hasattr(METHODS[method], "every") else {}
    return METHODS[method](**options)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: tuple[torch.Tensor, torch.Tensor]) -> None:
    """Like `tests.toy.step`, but without reading the loss, which would wait for the GPU."""
    optimizer.zero_grad()
    entropy(model, batch).backward()
    optimizer.step()


def train(
    method: str, plain: bool, dtype: torch.dtype = torch.float32, steps: int = STEPS
) -> tuple[optg.Sparsifier, nn.Module]:
    """Train with the reference if `plain`, else with the fused passes."""
    passes.BACKENDS[DEVICE] = "optg.core.passes.reference" if plain else "optg.core.passes.fused"
    model = network(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-3)
    batch = images_and_labels(dtype)
    options = {"synflow": {"rounds": 4}, "imp": {"fraction": 0.6}}.get(method, {})
    if hasattr(METHODS[method], "every"):
        options = {"every": 2}
    sparsifier = optg.sparsify(
        model, optimizer, METHODS[method](**options), epochs=4, steps_per_epoch=steps // 4, loss=entropy, batches=[batch] * 20,
        **goal(method, model, 0.8),
    )  # fmt: skip
    assert (sparsifier.weights.passes is reference) == plain
    for _ in range(steps):
        step(model, optimizer, batch)
    return sparsifier, model


@pytest.mark.parametrize("method", [name for name, method in METHODS.items() if method.when != "never"])
def test_a_method_learns_the_same_with_kernels_and_without(method):
    ours, model = train(method, plain=False)
    plain, other = train(method, plain=True)
    if method not in ("optg", "feather", "str", "st3", "st3-sigma"):
        assert torch.equal(ours.weights.counts.cpu(), plain.weights.counts.cpu())
        for p, q in zip(model.parameters(), other.parameters()):
            assert torch.equal(p, q)
    # The other kernels round differently, which now and then moves a weight over a threshold.
    changed = sum(int((mask != plain.masks[name]).sum()) for name, mask in ours.masks.items())
    assert changed <= 0.002 * ours.weights.size
    for (name, p), q in zip(model.named_parameters(), other.parameters()):
        same = ours.masks[name] == plain.masks[name] if name in ours.masks else ...
        torch.testing.assert_close(p[same], q[same], rtol=1e-2, atol=1e-4)


def test_bfloat16_weights():
    ours, model = train("optg", plain=False, dtype=torch.bfloat16)
    assert sum(int((p == 0).sum()) for p in model.parameters() if p.ndim > 1) >= 0.8 * ours.weights.size


@needs_cuda
@pytest.mark.parametrize("method", ["optg", "gmp", "rigl", "dpf", "feather", "str", "dnw", "gsm", "st3", "supermask"])
def test_a_step_never_waits_for_the_gpu(method):
    """Not even a step with a cut: torch would raise. Only the last step of an epoch waits, and no epoch ends here."""
    model = network(torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    batch = images_and_labels()
    sparsifier = optg.sparsify(model, optimizer, short(method, 2), sparsity=0.8, epochs=1, steps_per_epoch=30)
    try:
        for taken in range(20):
            torch.cuda.set_sync_debug_mode("error" if taken > 4 else "default")
            step(model, optimizer, batch)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert method == "gsm" or sparsifier.sparsity > 0


@needs_cuda
def test_nan_is_refused_when_the_gpu_has_met_it():
    sparsifier, model = train("gmp", plain=False, steps=4)
    optimizer, saved = sparsifier.optimizer, sparsifier.state_dict()
    saved["tensors"] = {kind: {name: t.clone() for name, t in of.items()} for kind, of in saved["tensors"].items()}
    for ask in (sparsifier.state_dict, optimizer.step, lambda: sparsifier.masks):
        optimizer.zero_grad()
        model[0].weight.data[0] = torch.nan
        sparsifier.method.cut(sparsifier.weights, 0.9)
        for _ in range(2):  # raising once does not clear it
            with pytest.raises(FloatingPointError, match=r"0\.weight"):
                ask()
        model[0].weight.data[0] = 1.0
        sparsifier.method.cut(sparsifier.weights, 0.9)
        assert sparsifier.sparsity == pytest.approx(0.9, abs=1e-3)
        sparsifier.load_state_dict(saved)  # puts valid weights back
    model[0].weight.data[0] = torch.nan
    sparsifier.method.cut(sparsifier.weights, 0.9)
    with pytest.raises(ValueError, match="not a sparsifier state"):
        sparsifier.load_state_dict({})
    with pytest.raises(FloatingPointError):
        sparsifier.finish()
    sparsifier.load_state_dict(saved)
    assert sparsifier.sparsity == pytest.approx(0.8, abs=1e-3)


@needs_cuda
@pytest.mark.parametrize("method", ["dnw", "supermask", "optg", "str", "rigl", "gmp", "set", "dpf", "feather", "st3-sigma"])
def test_a_step_is_captured_right_after_a_cut(method):
    batch, models = images_and_labels(), []
    for captured in (False, True):
        model = network(torch.float32)
        optimizer = torch.optim.SGD(model.parameters(), lr=torch.tensor(0.05, device=DEVICE), momentum=0.9, fused=True)
        sparsifier = optg.sparsify(model, optimizer, short(method, 3), sparsity=0.8, epochs=1, steps_per_epoch=30)
        graph = None
        while sparsifier.clock.step < 20:
            if not captured or sparsifier.clock.step < 9 or not sparsifier.capturable:
                step(model, optimizer, batch)
                continue
            if graph is None:
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    step(model, optimizer, batch)
            graph.replay()
            sparsifier.advance()
        models.append(model)
    for p, q in zip(models[0].parameters(), models[1].parameters()):
        torch.testing.assert_close(p, q, rtol=1e-3, atol=1e-4)


@needs_cuda
def test_a_table_made_under_capture_is_that_graphs_alone():
    graph, masks = torch.cuda.CUDAGraph(), [torch.zeros(64, dtype=torch.bool, device=DEVICE)]
    first, second = [torch.ones(64, device=DEVICE)], [torch.ones(64, device=DEVICE)]
    fused.mask(first, masks)  # a capture needs the shapes to be known
    with torch.cuda.graph(graph):
        fused.mask(second, masks)
    fused.mask(second, masks)
    assert not second[0].any()
    second[0].fill_(1.0)
    graph.replay()
    assert not second[0].any()


@needs_cuda
@pytest.mark.parametrize("options", [{"fused": True}, {"capturable": True}, {}])
def test_imp_goes_back_to_the_state_of_every_kind_of_optimizer(options):
    model = network(torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, **options)
    batch = images_and_labels()
    method = METHODS["imp"](fraction=0.5, rewind=0.5)
    optg.sparsify(model, optimizer, method, sparsity=0.75, epochs=1, steps_per_epoch=12)  # 3 cycles of 4 steps
    counts = []
    for _ in range(12):
        step(model, optimizer, batch)
        counts.append(int(optimizer.state[model[0].weight]["step"]))
    assert counts == [1, 2, 3, 2, 3, 4, 5, 2, 3, 4, 5, 6]
    assert optimizer.state[model[0].weight]["step"].is_cuda == bool(options)
