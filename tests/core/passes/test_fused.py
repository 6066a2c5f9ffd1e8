"""Every fused pass against its reference."""

from types import SimpleNamespace

import pytest
import torch

from optg.core.masks import keep_top
from optg.core.passes import reference
from optg.core.passes.reference import SoftThreshold
from optg.methods import METHODS
from tests.core.passes.fused_device import DEVICE

from optg.core.passes.fused import Passes  # isort: skip  (after fused_device, which skips this file where Triton is missing)

fused = Passes()

pytestmark = pytest.mark.usefixtures("fused_passes")
SHAPES = (3, 8, 3, 3), (16, 30), (2, 5), (1, 9000)


def random_lists(dtype: torch.dtype, layout: str) -> SimpleNamespace:
    """Return random values, masks, latent weights, gradients, momenta and scores of four layers."""

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


def copy_of(given: SimpleNamespace) -> SimpleNamespace:
    return SimpleNamespace(**{name: [t.clone() for t in tensors] for name, tensors in vars(given).items()})


def rates(step: float = 0.1) -> list[torch.Tensor]:
    return [torch.tensor(step * i, device=DEVICE) for i in range(4)]


# One factor per output: of the first dimension, the last, two of them as in a stack of experts, and of none.
FACTORS = [torch.rand(shape, device=DEVICE) for shape in ((3, 1, 1, 1), (1, 30), (2, 5), (1, 1))]

PASSES = {
    "restore": lambda p, x: p.restore(x.values, x.masks, x.latent),
    "settle": lambda p, x: p.settle(x.values, x.masks, x.latent),
    "mask": lambda p, x: p.mask(x.grads, x.masks),
    "mask, a share": lambda p, x: p.mask(x.grads, x.masks, 0.5),
    "accumulate": lambda p, x: p.accumulate(x.grads, x.masks, x.latent, x.momenta, x.scores, rates(), 0.9, None),
    "accumulate, skipped": lambda p, x: p.accumulate(
        [torch.zeros_like(g) for g in x.grads], x.masks, x.latent, x.momenta, x.scores,
        [torch.tensor(0.0, device=DEVICE) for _ in range(4)], 0.9, torch.tensor(True, device=DEVICE),
    ),
    "sum_signed": lambda p, x: p.sum_signed(x.grads, x.masks, x.latent, torch.float32),
    "scale_outputs": lambda p, x: p.scale_outputs(x.grads, FACTORS),
    "hyperbolic": lambda p, x: p.hyperbolic(x.values, x.latent, x.grads, rates(), 3.0),
    "rescale, a share": lambda p, x: p.rescale(x.values, x.masks, x.latent, rates(0.01), None, 0.5, 0.0),
    "rescale, HAM": lambda p, x: p.rescale(x.values, x.masks, x.latent, rates(0.01), None, 0.0, 0.1),
    "rescale, everything": lambda p, x: p.rescale(x.values, x.masks, x.latent, rates(0.01), FACTORS, 0.5, 0.1),
    "keep_above": lambda p, x: p.keep_above(x.masks, x.latent, torch.tensor([0.0, 0.5, 1.0, 9.0], device=DEVICE)),
}  # fmt: skip


@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("name", PASSES)
def test_each_pass_equals_the_reference(name, dtype, layout):
    given = random_lists(dtype, layout)
    expected, got = copy_of(given), copy_of(given)
    wanted, returned = PASSES[name](reference, expected), PASSES[name](fused, got)
    close = {"rtol": 1e-5, "atol": 1e-5} if dtype in (torch.float32, torch.float64) else {"rtol": 2e-2, "atol": 2e-2}
    exact = not name.startswith(("accumulate", "sum", "scale", "hyperbolic", "rescale"))
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
def test_soften_equals_the_reference(power, rescale):
    given = random_lists(torch.float32, "contiguous")
    method = METHODS["st3"](power=power, rescale=rescale)
    method.thresholds = torch.tensor([0.3, 0.0, 0.7, 0.5], device=DEVICE)
    method.state = {"thresholds": list(method.thresholds)}
    for mask, latent, t in zip(given.masks, given.latent, method.thresholds):
        mask.copy_(latent.abs() > t)  # like after a cut
    soft = SoftThreshold(method.thresholds, power, rescale)
    expected, got = copy_of(given), copy_of(given)
    given.threshold_ratio = lambda layer: None
    given.neuron_means = lambda layer, entries: entries.mean(list(range(1, entries.ndim)), keepdim=True)
    for module, target in ((reference, expected), (fused, got)):
        module.soften(target.values, target.masks, target.latent, lambda i, w: method.effective(given, i, w), soft)
    for want, have, mask in zip(expected.values, got.values, given.masks):
        torch.testing.assert_close(have, want, rtol=1e-4, atol=1e-6)
        assert not have[~mask].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("each", [False, True])
def test_thresholds_equal_those_of_a_sort(dtype, each):
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
    scores[5][:] = 3.0  # more ties than one program reads at once
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
