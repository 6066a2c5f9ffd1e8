"""The Triton kernels against torch's own operations: on a GPU, or anywhere with Triton installed and TRITON_INTERPRET=1."""

import os

import pytest
import torch
from torch import nn

import optg
from optg.core import ranking
from optg.methods import METHODS, Method
from tests.toy import entropy

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if not torch.cuda.is_available() and not INTERPRETED:
    pytest.skip("needs a GPU, or Triton's interpreter", allow_module_level=True)
kernels = pytest.importorskip("optg.core.passes.fused")
DEVICE = "cpu" if INTERPRETED else "cuda"


def network(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 64, 3), nn.ReLU(), nn.Flatten(), nn.Linear(1024, 5)
    return nn.Sequential(*layers).to(DEVICE, dtype, memory_format=torch.channels_last)  # type: ignore[call-overload]


def images_and_labels(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(8, 3, 8, 8, device=DEVICE, dtype=dtype), torch.arange(8, device=DEVICE) % 5


def short(method: str, every: int) -> Method:
    """A method as in a run of 30 steps: it cuts every so many, and STR's threshold begins among the weights."""
    options = {"initial": -5.0} if method == "str" else {"every": every} if hasattr(METHODS[method], "every") else {}
    return METHODS[method](**options)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: tuple[torch.Tensor, torch.Tensor]) -> None:
    """`tests.toy.step` without a look at the loss, which would wait for the GPU."""
    optimizer.zero_grad()
    entropy(model, batch).backward()
    optimizer.step()


def train(method: str, plain: bool, dtype: torch.dtype = torch.float32, steps: int = 24) -> tuple[optg.Sparsifier, nn.Module]:
    model = network(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-3)
    batch = images_and_labels(dtype)
    options = {"every": 2} if hasattr(METHODS[method], "every") else {}
    sparsifier = optg.sparsify(
        model, optimizer, METHODS[method](**options), sparsity=0.8, epochs=4, steps_per_epoch=steps // 4,
        loss=entropy, batches=[batch] * 20,
    )  # fmt: skip
    if plain:
        sparsifier.weights.tables = None
    for _ in range(steps):
        step(model, optimizer, batch)
    return sparsifier, model


@pytest.fixture(autouse=True)
def everywhere(monkeypatch):
    """Let the kernels work on CPU tensors where they are interpreted."""
    torch.manual_seed(0)
    if INTERPRETED:
        for user in ("optg.core.weights", "optg.core.ranking"):
            monkeypatch.setattr(f"{user}.find_kernels", lambda tensors: kernels)


@pytest.mark.parametrize("method", [name for name, method in METHODS.items() if method.when != "never"])
def test_a_method_learns_the_same_with_kernels_and_without(method):
    fused, model = train(method, plain=False)
    plain, other = train(method, plain=True)
    assert fused.weights.tables is not None and (fused.weights.tables.tables)
    if method not in ("optg", "feather", "str", "st3", "st3-sigma"):
        assert torch.equal(fused.weights.counts.cpu(), plain.weights.counts.cpu())
        for p, q in zip(model.parameters(), other.parameters()):
            assert torch.equal(p, q)
    # In the others a kernel rounds in its own way, and now and then that moves a weight over a threshold.
    changed = sum(int((mask != plain.masks[name]).sum()) for name, mask in fused.masks.items())
    assert changed <= 0.002 * fused.weights.size
    for (name, p), q in zip(model.named_parameters(), other.parameters()):
        same = fused.masks[name] == plain.masks[name] if name in fused.masks else ...
        torch.testing.assert_close(p[same], q[same], rtol=1e-2, atol=1e-4)


def test_bfloat16_weights():
    fused, model = train("optg", plain=False, dtype=torch.bfloat16)
    assert fused.weights.tables.tables
    assert sum(int((p == 0).sum()) for p in model.parameters() if p.ndim > 1) >= 0.8 * fused.weights.size


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("each", [False, True])
def test_thresholds_are_those_of_a_sort(dtype, each):
    scores = [torch.randn(n, device=DEVICE, dtype=dtype) for n in (20_000, 3, 700)]
    scores[0][::3] = 0.0
    scores[2][:600] = -0.0
    for share in (0.1, 0.4, 0.5, 0.9, 1.0):
        zeros = [int(share * len(s)) for s in scores] if each else [int(share * sum(map(len, scores)))]
        cuts = ranking.select(scores, zeros if each else zeros[0])
        for cut, zero, group in zip(cuts.on_host(), zeros, scores if each else [torch.cat(scores)]):
            if zero:
                value = group.sort().values[zero - 1]
                assert (cut.value, cut.equal) == (value, int((group == value).sum()))
                assert cut.removed == zero - int((group < value).sum())
    every_third = torch.tensor([7_000, 0, 0, 2, 0, 0, 300, 0, 0], dtype=torch.int32, device=DEVICE)[::3]
    assert [int((~mask).sum()) for mask in ranking.keep_top(scores, every_third)] == [7_000, 2, 300]
    scores[1][1] = torch.nan
    with pytest.raises(FloatingPointError, match="tensor 1"):
        ranking.keep_top(scores, [1, 1, 1] if each else 1)


def test_scores_that_are_not_aligned():
    memory = torch.randn(9001, device=DEVICE)
    table = kernels.Tables()([memory[1:]])
    assert table.align == 1
    masks, threshold = [torch.zeros(9000, dtype=torch.bool, device=DEVICE)], torch.zeros(1, device=DEVICE)
    table = kernels.Tables()(masks, [memory[1:]])
    drop = torch.full([1], kernels.DROP, device=DEVICE)
    counts = kernels.recut(table, torch.float32, threshold, drop, kernels.places(masks, True))
    assert torch.equal(masks[0], memory[1:] > 0)
    assert counts.tolist() == [[int((memory[1:] <= 0).sum()), 0, int((memory[1:] > 0).sum())]]


@pytest.mark.parametrize("each", [False, True])
def test_ties_go_by_index_in_whatever_layout(each):
    shapes = (9, 4, 3, 3), (20, 30), (3, 16, 1, 1), (40,), (3, 5, 2, 3, 4), (40, 500)
    scores = [torch.randint(5, shape, device=DEVICE).float() for shape in shapes]
    scores[0], scores[1] = scores[0].to(memory_format=torch.channels_last), scores[1].T.contiguous().T
    scores[4] = scores[4].to(memory_format=torch.channels_last_3d)
    scores[5][:] = 3.0  # more ties than a program looks at together
    before = [torch.empty_like(s, dtype=torch.bool).copy_(torch.rand(s.shape) > 0.5) for s in scores]
    total = sum(s.numel() for s in scores)
    for share in (0.13, 0.5, 0.77):
        zeros = [int(share * s.numel()) for s in scores] if each else [int(share * total)]
        cuts = ranking.select(scores, zeros if each else zeros[0])
        masks = [b.clone() for b in before]
        counts = ranking.recut(masks, scores, cuts, kernels.Tables())
        for mask, old, expected, count in zip(masks, before, ranking.each_mask(scores, cuts), counts.tolist()):
            assert torch.equal(mask, expected)
            assert count == [int((~mask).sum()), int((old & ~mask).sum()), int((mask & ~old).sum())]


def test_lists_of_other_layouts_are_left_to_torch():
    weight = torch.randn(4, 3, 3, 3, device=DEVICE)
    assert kernels.Tables()([weight], [weight.to(memory_format=torch.channels_last)]) is None
    assert kernels.Tables()([weight[:, :2]]) is None


def test_what_a_graph_reads_is_never_dropped(monkeypatch):
    tables, tensors = kernels.Tables(), [torch.zeros(64, device=DEVICE) for _ in range(40)]
    captured = kernels.Table(torch.zeros(3, 1), torch.zeros(1, 1), 16)
    monkeypatch.setattr(tables, "make", lambda lists, capturing: captured)
    used = tables([tensors[0]])
    tables.captured.append(used)
    monkeypatch.undo()
    for tensor in tensors[1:]:
        tables([tensor])
    assert len(tables.tables) == tables.KEPT and used in tables.captured
    again = tables([tensors[-1]])
    assert tables([tensors[-1]]) is again


@pytest.mark.skipif(INTERPRETED, reason="needs CUDA")
@pytest.mark.parametrize("method", ["optg", "gmp", "rigl", "dpf", "feather", "str", "dnw", "gsm", "st3", "supermask"])
def test_a_step_never_waits_for_the_gpu(method):
    """Not even where it cuts a mask: torch would raise. Once an epoch a step waits, and no epoch ends here."""
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


@pytest.mark.skipif(INTERPRETED, reason="needs CUDA")
def test_nan_is_refused_when_the_gpu_has_met_it():
    sparsifier, model = train("gmp", plain=False, steps=4)
    optimizer, saved = sparsifier.optimizer, sparsifier.state_dict()
    saved["tensors"] = {kind: {name: t.clone() for name, t in of.items()} for kind, of in saved["tensors"].items()}
    for ask in (sparsifier.state_dict, optimizer.step, lambda: sparsifier.masks):
        optimizer.zero_grad()
        model[0].weight.data[0] = torch.nan
        sparsifier.method.cut(sparsifier.weights, 0.9)
        for _ in range(2):  # it is not forgotten by being said
            with pytest.raises(FloatingPointError, match=r"0\.weight"):
                ask()
        model[0].weight.data[0] = 1.0
        sparsifier.method.cut(sparsifier.weights, 0.9)
        assert sparsifier.sparsity == pytest.approx(0.9, abs=1e-3)
        sparsifier.load_state_dict(saved)  # NaN of removed weights would be no one's scores
    model[0].weight.data[0] = torch.nan
    sparsifier.method.cut(sparsifier.weights, 0.9)
    with pytest.raises(ValueError, match="no sparsifier state"):
        sparsifier.load_state_dict({})
    with pytest.raises(FloatingPointError):
        sparsifier.finish()
    sparsifier.load_state_dict(saved)
    assert sparsifier.sparsity == pytest.approx(0.8, abs=1e-3)


@pytest.mark.skipif(INTERPRETED, reason="needs CUDA")
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


@pytest.mark.skipif(INTERPRETED, reason="needs CUDA")
def test_a_table_made_under_capture_is_that_graphs_alone():
    tables, graph, masks = kernels.Tables(), torch.cuda.CUDAGraph(), [torch.zeros(64, dtype=torch.bool, device=DEVICE)]
    first, second = [torch.ones(64, device=DEVICE)], [torch.ones(64, device=DEVICE)]
    kernels.fade(tables(first, masks), torch.float32)  # a graph wants to have seen the shapes
    with torch.cuda.graph(graph):
        kernels.fade(tables(second, masks), torch.float32)
    kernels.fade(tables(second, masks), torch.float32)
    assert not second[0].any()
    second[0].fill_(1.0)
    graph.replay()
    assert not second[0].any()


@pytest.mark.skipif(INTERPRETED, reason="needs CUDA")
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
