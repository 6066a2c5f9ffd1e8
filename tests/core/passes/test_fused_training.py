"""Whole runs with fused passes: the results of the reference, CUDA graphs, and no waiting for the GPU."""

import pytest
import torch
from torch import nn

import optg
from optg.core import passes
from optg.core.passes import reference
from optg.methods import METHODS, Method
from tests.core.passes.fused_device import DEVICE, INTERPRETED, needs_cuda
from tests.toy import entropy, goal

pytestmark = pytest.mark.usefixtures("fused_passes")
STEPS = 8 if INTERPRETED else 24  # per run; the interpreter is slow
ALIKE = ("set", "granet", "dpf", "dnw", "taylor", "synflow", "snip", "st3-sigma", "sr-ste")  # they use the passes of others


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


def test_filters_that_are_not_rows_are_rescaled_alike():
    found = []
    for backend in ("reference", "fused"):
        passes.BACKENDS[DEVICE] = f"optg.core.passes.{backend}"
        torch.manual_seed(0)
        layer = nn.ConvTranspose2d(4, 6, 3, bias=False).to(DEVICE)
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
        method = METHODS["st3"](schedule="constant")
        optg.sparsify(layer, optimizer, method, sparsity=0.5, epochs=1, steps_per_epoch=9)
        found.append(layer.weight.detach())
    assert torch.equal(*found)


@pytest.mark.parametrize(
    "method",
    [
        pytest.param(name, marks=pytest.mark.long if INTERPRETED and name in ALIKE else ())
        for name, method in METHODS.items()
        if method.when != "never"
    ],
)
def test_every_method_learns_the_same_with_fused_passes_and_the_reference(method):
    ours, model = train(method, plain=False)
    plain, other = train(method, plain=True)
    if method not in ("optg", "feather", "phoenix", "str", "st3", "st3-sigma"):
        assert torch.equal(ours.weights.counts.cpu(), plain.weights.counts.cpu())
        for p, q in zip(model.parameters(), other.parameters()):
            assert torch.equal(p, q)
    # The kernels of these methods round differently, so a few weights may cross a threshold.
    changed = sum(int((mask != plain.masks[name]).sum()) for name, mask in ours.masks.items())
    assert changed <= 0.002 * ours.weights.size
    for (name, p), q in zip(model.named_parameters(), other.parameters()):
        same = ours.masks[name] == plain.masks[name] if name in ours.masks else ...
        torch.testing.assert_close(p[same], q[same], rtol=1e-2, atol=1e-4)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    cuda = DEVICE == "cuda"
    return torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.01, device=DEVICE), fused=cuda, capturable=cuda)


def momentum_sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=torch.tensor(0.05, device=DEVICE), momentum=0.9, fused=DEVICE == "cuda")


def boosted(method: str) -> Method:
    """Return a method with HAM and SparseOpt; Feather with a share for dormant weights."""
    own = {"feather": {"theta": 0.5, "every": 3}, "dpf": {"every": 3}, "gmp": {"every": 3}}.get(method, {})
    return METHODS[method](ham=50.0, sparse_opt=True, **own)


@pytest.mark.parametrize("make", [momentum_sgd, adamw])
@pytest.mark.parametrize("method", ["dense", "gmp", "feather", "optg"])
def test_ham_and_sparse_opt_learn_the_same_with_fused_passes_and_the_reference(method, make):
    models = []
    for backend in ("optg.core.passes.reference", "optg.core.passes.fused"):
        passes.BACKENDS[DEVICE] = backend
        model = network(torch.float32)
        optimizer = make(model)
        sparsifier = optg.sparsify(model, optimizer, boosted(method), steps=9, sparsity=0.0 if method == "dense" else 0.5)
        torch.manual_seed(1)
        batch = images_and_labels()
        for _ in range(9):
            step(model, optimizer, batch)
        models.append([v.clone() for v in sparsifier.weights.latent or sparsifier.weights.values])
    for p, q in zip(*models):
        different = (p - q).abs() > 1e-4 + 1e-2 * q.abs()
        assert different.float().mean() < 0.002  # the kernels round differently, so a few weights may cross a threshold


@needs_cuda
@pytest.mark.parametrize("make", [momentum_sgd, adamw])
@pytest.mark.parametrize("method", ["dense", "gmp", "feather", "optg", "str"])
def test_steps_with_ham_and_sparse_opt_are_captured_and_never_wait(method, make):
    batch, models = images_and_labels(), []
    for captured in (False, True):
        model = network(torch.float32)
        optimizer = make(model)
        goals = {"sparsity": 0.0 if method == "dense" else 0.8}
        sparsifier = optg.sparsify(model, optimizer, boosted(method), epochs=2, steps_per_epoch=30, **goals)
        graph = None
        try:
            while sparsifier.clock.step < 20:
                if not captured or sparsifier.clock.step < 9:
                    torch.cuda.set_sync_debug_mode("error" if sparsifier.clock.step > 5 else "default")
                    step(model, optimizer, batch)
                    continue
                torch.cuda.set_sync_debug_mode("default")
                if graph is None:
                    graph = torch.cuda.CUDAGraph()
                    with torch.cuda.graph(graph):
                        step(model, optimizer, batch)
                graph.replay()
                sparsifier.advance()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        models.append(model)
    for p, q in zip(models[0].parameters(), models[1].parameters()):
        torch.testing.assert_close(p, q, rtol=1e-3, atol=1e-4)


def test_bfloat16_weights_reach_the_target():
    ours, model = train("optg", plain=False, dtype=torch.bfloat16)
    assert sum(int((p == 0).sum()) for p in model.parameters() if p.ndim > 1) >= 0.8 * ours.weights.size


@needs_cuda
@pytest.mark.parametrize(
    "method", ["optg", "gmp", "rigl", "dpf", "feather", "phoenix", "str", "dnw", "gsm", "st3", "supermask"]
)
def test_a_step_never_waits_for_the_gpu(method):
    """Not even a step with a cut: torch would raise. Only the last step of an epoch waits, and this run is shorter."""
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
def test_nan_raises_once_the_gpu_has_found_it():
    sparsifier, model = train("gmp", plain=False, steps=4)
    optimizer, saved = sparsifier.optimizer, sparsifier.state_dict()
    saved["tensors"] = {kind: {name: t.clone() for name, t in layers.items()} for kind, layers in saved["tensors"].items()}
    for ask in (sparsifier.state_dict, optimizer.step, lambda: sparsifier.masks):
        optimizer.zero_grad()
        model[0].weight.data[0] = torch.nan
        sparsifier.method.cut(sparsifier.weights, 0.9)
        for _ in range(2):  # the error stays after it was raised once
            with pytest.raises(FloatingPointError, match=r"0\.weight"):
                ask()
        model[0].weight.data[0] = 1.0
        sparsifier.method.cut(sparsifier.weights, 0.9)
        assert sparsifier.sparsity == pytest.approx(0.9, abs=1e-3)
        sparsifier.load_state_dict(saved)  # restores valid weights
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
@pytest.mark.parametrize("options", [{"fused": True}, {"capturable": True}, {}])
def test_imp_rewinds_every_kind_of_adamw(options):
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
