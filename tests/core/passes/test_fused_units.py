"""Every fused pass of structures against its reference, to the bit."""

import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import optg
from optg.core import passes
from optg.core.assignment import parse_structure
from optg.core.fixed_point import FixedPoint
from optg.core.layer_kinds import Axes
from optg.core.passes import units
from tests.core.passes.fused_device import DEVICE, INTERPRETED
from tests.toy import convnet

from optg.core.passes.fused import Passes  # isort: skip  (after fused_device, which skips this file where Triton is missing)

pytestmark = pytest.mark.usefixtures("fused_passes")
LAYERS = {  # shapes that no structure divides, and sizes of more than one program
    "linear": ((7, 30), Axes()),
    "long linear": ((4, 9001), Axes()),
    "input first": ((30, 9), Axes(1, 0)),
    "attention": ((9, 10), Axes(0, 1, 3)),
    "experts": ((2, 9, 10), Axes(1, 2, 2)),
    "convolution": ((6, 10, 3, 3), Axes()),
    "1x1 convolution": ((5, 12, 1, 1), Axes()),
    "transposed convolution": ((10, 6, 2, 2), Axes(1, 0)),
    "3d convolution": ((3, 9, 2, 3, 2), Axes()),
}
AXES = [axes for _, axes in LAYERS.values()]
BLOCKS = ["1x4", "4x1", "2x2", "3x5"]
# Operations that are not a cut's own: the interpreter moves the arguments of kernels, and a GPU gets tables of new addresses.
IGNORED = (
    ("aten::set_", "aten::copy_") if INTERPRETED else ("aten::is_pinned", "aten::_pin_memory", "aten::clone", "aten::_to_copy")
)


def draw(kind: str, dtype: torch.dtype, layout: str) -> list[torch.Tensor]:
    """Return scores of all layers: random, or with many ties, both zeros and both infinities."""
    made = []
    for i, (shape, _) in enumerate(LAYERS.values()):
        generator = torch.Generator().manual_seed(i)
        score = torch.randn(shape, generator=generator)
        if kind == "infinite":
            score = torch.randint(-2, 3, shape, generator=generator) * (score.sign() / 2)
            score[torch.rand(shape, generator=generator) < 0.2] = math.inf
            score[torch.rand(shape, generator=generator) < 0.2] = -math.inf
        score = score.to(DEVICE, dtype)
        if layout == "channels_last" and len(shape) > 3:
            score = score.to(memory_format=torch.channels_last if len(shape) == 4 else torch.channels_last_3d)
        made.append(score)
    return made


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a.nan_to_num(nan=7.0, posinf=8.0), b.nan_to_num(nan=7.0, posinf=8.0))


def refuse(*args):
    raise AssertionError("a fused pass left the work to the reference")


@pytest.fixture
def fused(monkeypatch):
    """Return fused passes that may not call their reference, and a copy of the reference."""
    reference = SimpleNamespace(
        **{name: getattr(units, name) for name in ("protect", "scan", "unit_means", "write_units", "ratios")}
    )
    for name in vars(reference):
        monkeypatch.setattr(units, name, refuse)
    return Passes(), reference


LAYOUTS = ["contiguous", "channels_last"]
HALF = [(torch.bfloat16, "contiguous")]
HALF += [] if INTERPRETED else [(torch.float16, "contiguous")]  # the interpreter is slow, and computes both alike
KINDS = [*((torch.float32, layout) for layout in LAYOUTS), *HALF]


@pytest.mark.parametrize(("dtype", "layout"), KINDS)
@pytest.mark.parametrize("text", ["2:4", "1:3", "4:8"])
def test_nm_protects_what_the_reference_protects(text, dtype, layout, fused):
    ours, reference = fused
    for kind in ("random", "infinite"):
        scores = draw(kind, dtype, layout)
        pairs = zip(ours.protect(parse_structure(text), scores, AXES), reference.protect(parse_structure(text), scores, AXES))
        for got, expected in pairs:
            assert same(got, expected)


def test_nm_keeps_nan(fused):
    scores = draw("infinite", torch.float32, "contiguous")
    for score in scores:
        score[0] = math.nan
    for got, score in zip(fused[0].protect(parse_structure("2:4"), scores, AXES), scores):
        assert torch.equal(got.isnan(), score.isnan())


@pytest.mark.parametrize(
    ("text", "dtype", "layout"),
    [*((text, torch.float32, layout) for text in BLOCKS for layout in LAYOUTS), *(("1x4", *half) for half in HALF)],
)
def test_blocks_have_the_means_of_the_reference(text, dtype, layout, fused):
    ours, reference = fused
    structure = parse_structure(text)
    for kind in ("random", "infinite") if text == "1x4" else ("infinite",):
        values = draw(kind, dtype, layout)
        values[1][0, 0] = math.nan
        values[2][0, 0] = torch.finfo(dtype).max
        sizes = [structure.sizes(v.shape, axes, v.device) for v, axes in zip(values, AXES)]
        found = []
        for backend in (ours, reference):
            fixed = FixedPoint(values, math.prod(structure.numbers), None, backend)
            assert fixed.nan.tolist() == [i == 1 for i in range(len(values))]
            found.append(backend.unit_means(structure, values, AXES, sizes, fixed))
        assert all(map(same, *found))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("text", BLOCKS)
def test_masks_of_blocks_are_written_like_in_the_reference(text, layout, fused):
    structure = parse_structure(text)
    masks = [score > 0 for score in draw("random", torch.float32, layout)]
    kept = [torch.rand(structure.unit_shape(m.shape, axes), device=DEVICE) > 0.5 for m, axes in zip(masks, AXES)]

    def expand(units, masks):
        return [structure.expand(unit, mask.shape, axes) for unit, mask, axes in zip(units, masks, AXES)]

    written = [[mask.clone() for mask in masks] for _ in fused]
    counts = [passes.write_units(structure, new, kept, AXES, expand) for passes, new in zip(fused, written)]
    assert torch.equal(*counts) and all(map(torch.equal, *written))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_masks_of_channels_are_written_like_in_the_reference(layout, fused):
    model = convnet().to(DEVICE, memory_format=torch.channels_last if layout == "channels_last" else torch.contiguous_format)
    optimizer, example = torch.optim.SGD(model.parameters(), lr=0.1), torch.zeros(1, 1, 8, 8, device=DEVICE)
    weights = optg.sparsify(model, optimizer, "gmp", sparsity=0.5, structure="channel", example=example, steps=9).weights
    pool = weights.mask_set.pools[0]
    kept = [torch.rand(shape, device=DEVICE) > 0.5 for shape in pool.unit_shapes]
    before = [torch.rand(mask.shape, device=DEVICE) > 0.5 for mask in weights.masks]
    written = [[torch.empty_like(mask).copy_(b) for mask, b in zip(weights.masks, before)] for _ in fused]
    counts = [passes.write_units(pool.structure, masks, kept, pool.axes, pool.expand) for passes, masks in zip(fused, written)]
    assert torch.equal(*counts) and all(map(torch.equal, *written))


@pytest.mark.parametrize(("text", "dtype", "layout"), [*(("2:4", *kind) for kind in KINDS), ("2x2", *KINDS[0])])
def test_ratios_equal_those_of_the_reference(text, dtype, layout, fused):
    structure = parse_structure(text)
    latent = [value * (value.abs() > 0.1) for value in draw("random", dtype, layout)]
    masks = [value.abs() > 0.5 for value in latent]
    thresholds = list(torch.linspace(0, 0.4, len(latent), device=DEVICE))
    pairs = zip(*(passes.ratios(structure, latent, masks, thresholds, AXES) for passes in fused))
    for got, expected in pairs:
        torch.testing.assert_close(
            got.clamp(max=1), expected.clamp(max=1), rtol=1e-5 if dtype == torch.float32 else 0.02, atol=0
        )


@pytest.mark.parametrize(("method", "text"), [("feather", "2:4"), ("feather", "1x4"), ("st3", "2:4"), ("s-ste", "2:4")])
def test_soft_thresholds_train_like_with_the_reference(method, text, monkeypatch):
    found = []
    for backend in ("reference", "fused"):
        monkeypatch.setitem(passes.BACKENDS, DEVICE, f"optg.core.passes.{backend}")
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(18, 12), nn.ReLU(), nn.Linear(12, 5)).to(DEVICE)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        sparsifier = optg.sparsify(model, optimizer, method, sparsity=None if ":" in text else 0.5, structure=text, steps=8)
        for batch in torch.randn(8, 6, 18, generator=torch.Generator().manual_seed(0)).to(DEVICE):
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()
        found.append((sparsifier.sparsity, [p.detach() for p in model.parameters()]))
    assert found[0][0] == found[1][0] > 0.4
    for expected, got in zip(found[0][1], found[1][1]):
        torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(
    ("text", "dtype"),
    [
        *((text, torch.float32) for text in ("2:4", "1x4", "4x1", "2x2", "channel")),
        ("2:4", torch.float64),
        ("1x4", torch.float64),
    ],
)
def test_a_whole_cut_equals_that_of_the_reference(text, dtype, monkeypatch):
    found = []
    for backend in ("reference", "fused"):
        monkeypatch.setitem(passes.BACKENDS, DEVICE, f"optg.core.passes.{backend}")
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(3, 10, 3), nn.ReLU(), nn.Conv2d(10, 8, 3), nn.Flatten(), nn.Linear(128, 9))
        model = model.to(DEVICE, dtype, memory_format=torch.channels_last)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        example = torch.zeros(1, 3, 8, 8, device=DEVICE, dtype=dtype)
        goal = None if ":" in text else 0.6
        weights = optg.sparsify(model, optimizer, "gmp", sparsity=goal, structure=text, steps=9, example=example).weights
        scores = [value.abs().mul(4).round() for value in weights.values]  # many ties
        for budget in ("global", "uniform"):
            for share in (0.5, 1.0):
                thresholds = weights.cut(scores, weights.target * share, budget)
                found.append([thresholds.double(), weights.counts, *(mask.clone() for mask in weights.masks)])
    for expected, got in zip(found[:4], found[4:]):
        assert all(map(torch.equal, expected, got))


class Operations(TorchDispatchMode):
    """Collect the torch operations that a GPU would run: neither views nor allocations."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if not func.is_view and not func.name().startswith(("aten::empty", *IGNORED)):
            self.names.append(func.name())
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("text", ["2:4", "1x4"])
def test_a_cut_runs_as_many_operations_for_many_layers_as_for_few(text):
    found = []
    for layers in (2, 12):
        model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(layers))).to(DEVICE)
        optimizer, goal = torch.optim.SGD(model.parameters(), lr=0.1), None if ":" in text else 0.5
        weights = optg.sparsify(model, optimizer, "gmp", sparsity=goal, structure=text, steps=9).weights
        scores = [value.abs() for value in weights.values]
        weights.cut(scores, weights.target / 2)
        with Operations() as operations:
            weights.cut(scores, weights.target / 2)
        found.append(operations.names)
    assert found[0] == found[1]
