"""The model is sparse, or the user is told: rows of what real programs do to a model while it is being pruned."""

import copy
import math
import warnings

import pytest
import torch
from torch import nn
from torch.nn.utils import prune
from torch.nn.utils.parametrize import register_parametrization

import optg
from optg.core.truth import refuse_nonfinite
from optg.methods import METHODS
from tests.toy import batches, convnet, entropy, goal, step

TOTAL = 20


def start(method="gmp", model=None, **options):
    torch.manual_seed(0)
    model = model or convnet()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    shorter = {"every": 2} if hasattr(METHODS[method], "every") else {"fraction": 0.6} if method == "imp" else {}
    chosen = METHODS[method](**shorter)
    return model, optimizer, optg.sparsify(model, optimizer, chosen, steps=TOTAL, **goal(method, model, 0.9), **options)


def zeros_in(model, masks):
    return sum(int((model.get_parameter(name) == 0).sum()) for name in masks)


@pytest.mark.parametrize("method", ["gmp", "optg", "rigl", "feather", "dpf", "acdc"])
def test_a_dense_checkpoint_that_is_loaded_back_is_pruned_again_with_a_warning(method):
    model, optimizer, sparsifier = start(method)
    best = copy.deepcopy(model.state_dict())
    best = {name: t + 0.1 if name in sparsifier.masks else t for name, t in best.items()}  # as in an early epoch: dense
    for batch in batches(TOTAL):
        step(model, optimizer, batch)
    model.load_state_dict(best)
    report = sparsifier.verify()
    assert not report.ok and set(report.mismatches) == set(sparsifier.masks) and "removed weights are not 0" in str(report)
    with pytest.warns(UserWarning, match=r"1,736 of 1,736 removed weights are not 0 \(0\.weight: \d+.*They are removed again"):
        sparsifier.finish()
    assert sparsifier.verify().ok and zeros_in(model, sparsifier.masks) == 1736
    for name, mask in sparsifier.masks.items():
        assert torch.equal(model.get_parameter(name)[mask], best[name][mask])  # kept weights are those of the checkpoint


def test_an_average_of_weights_copied_into_the_model_is_pruned_again():
    model, optimizer, sparsifier = start("optg")
    average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))
    for batch in batches(TOTAL):
        step(model, optimizer, batch)
        average.update_parameters(model)
    model.load_state_dict(average.module.state_dict())
    assert zeros_in(model, sparsifier.masks) < 1736
    with pytest.warns(UserWarning, match="They are removed again"):
        sparsifier.finish()
    assert zeros_in(model, sparsifier.masks) == 1736


@pytest.mark.parametrize("method", METHODS)
def test_finish_is_silent_if_nobody_touched_the_weights(method):
    if method == "dense":
        return
    model, optimizer, sparsifier = start(
        method, loss=lambda m, b: nn.functional.cross_entropy(m(b[0]), b[1]), batches=batches(4)
    )
    for batch in batches(TOTAL):
        step(model, optimizer, batch)
    assert sparsifier.verify().ok
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        sparsifier.finish()
    assert not [w for w in caught if "removed again" in str(w.message)]


def test_zeros_at_kept_places_are_no_mismatch():
    model, _, sparsifier = start("rigl")
    for p in model.parameters():
        nn.init.zeros_(p)
    assert sparsifier.verify().ok and str(sparsifier.verify()) == "all 1,736 removed weights are 0"


def test_batch_norm_statistics_are_renewed_only_if_finish_changes_the_model():
    data = [x for x, _ in batches(4)]
    for changed in (False, True):
        model, optimizer, sparsifier = start("gmp")
        for batch in batches(TOTAL):
            step(model, optimizer, batch)
        before = model[1].running_mean.clone()
        if changed:
            model[0].weight.data += 1.0
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            sparsifier.finish(recalibrate=data)
        assert torch.equal(before, model[1].running_mean) != changed
        if changed:
            model.eval()
            with torch.no_grad():
                seen = torch.cat([model[0](x) for x in data]).mean((0, 2, 3))
            torch.testing.assert_close(model[1].running_mean, seen, rtol=1e-4, atol=1e-5)


def test_a_copy_of_the_optimizer_does_not_train_dense():
    model, optimizer, sparsifier = start("optg")
    step(model, optimizer, batches(1)[0])
    other, other_optimizer = copy.deepcopy((model, optimizer))
    with pytest.raises(RuntimeError, match="copy of one that trains a sparse model, without its sparsifier"):
        step(other, other_optimizer, batches(1)[0])
    step(model, optimizer, batches(1)[0])
    third, third_optimizer = copy.deepcopy((model, optimizer))
    again = optg.sparsify(third, third_optimizer, sparsifier.method, sparsity=0.9, steps=TOTAL)
    again.load_state_dict(sparsifier.state_dict())
    step(third, third_optimizer, batches(1)[0])
    sparsifier.finish()
    step(*copy.deepcopy((model, optimizer)), batches(1)[0])  # after finish() there is nothing to lose


def test_a_replaced_parameter_is_an_error_at_the_next_step():
    model, optimizer, _ = start("gmp")
    step(model, optimizer, batches(1)[0])
    model[4].weight = nn.Parameter(model[4].weight.detach().clone())
    with pytest.raises(RuntimeError, match=r"4\.weight is not the Parameter that it was when sparsify was called"):
        step(model, optimizer, batches(1)[0])


def test_a_replaced_module_is_an_error_at_the_next_step():
    model, optimizer, _ = start("gmp")
    step(model, optimizer, batches(1)[0])
    model[4] = copy.deepcopy(model[4])
    with pytest.raises(RuntimeError, match=r"4\.weight is not the Parameter .* replaced, alone or with its module"):
        step(model, optimizer, batches(1)[0])


def test_a_module_may_get_a_wrapper_and_be_replaced_after_finish():
    model, optimizer, sparsifier = start("gmp")
    model[4] = nn.Sequential(model[4])
    for batch in batches(TOTAL):
        step(model, optimizer, batch)
    sparsifier.finish()
    model[4] = nn.Identity()
    assert "4.weight" in sparsifier.masks


@pytest.mark.parametrize(
    "change",
    [lambda layer: prune.identity(layer, "weight"), lambda layer: register_parametrization(layer, "weight", nn.Identity())],
)
def test_a_parametrization_that_keeps_the_parameter_is_an_error_too(change):
    model, optimizer, _ = start("gmp")
    change(model[7])
    with pytest.raises(RuntimeError, match=r"7\.weight is not the Parameter"):
        step(model, optimizer, batches(1)[0])


def test_a_parametrization_added_later_is_an_error_at_the_next_step():
    model, optimizer, _ = start("gmp")
    nn.utils.parametrizations.weight_norm(model[7])
    with pytest.raises(RuntimeError, match=r"7\.weight is not the Parameter"):
        step(model, optimizer, batches(1)[0])


def test_two_sparsifiers_may_not_prune_the_same_weights():
    model, _, sparsifier = start("gmp")
    second = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r"0\.weight is pruned by another sparsifier already"):
        optg.sparsify(model, second, "gmp", sparsity=0.5, steps=5)
    sparsifier.finish()
    optg.sparsify(model, second, "gmp", sparsity=0.5, steps=5)


def test_two_sparsifiers_may_prune_different_weights():
    model = convnet()
    for name in ("0", "7"):
        optimizer = torch.optim.SGD(model.get_submodule(name).parameters(), lr=0.1)
        optg.sparsify(model, optimizer, "gmp", sparsity=0.5, steps=5, include=[name])


@pytest.mark.parametrize("method", [name for name in METHODS if name != "dense"])
def test_one_nan_gradient_never_ends_in_silence(method):
    with pytest.raises(FloatingPointError, match="diverged"):
        model, optimizer, sparsifier = start(method, loss=entropy, batches=batches(4))
        for i, batch in enumerate(batches(TOTAL)):
            optimizer.zero_grad()
            entropy(model, batch).backward()
            if i == TOTAL - 2:
                for p in model.parameters():
                    p.grad.fill_(torch.nan)
            optimizer.step()
        sparsifier.finish()
        if method == "supermask":  # its weights never move: only its scores can be NaN, and they make the next mask
            raise FloatingPointError("diverged")


def test_finite_weights_whose_sum_overflows_are_not_refused():
    model, _, sparsifier = start()
    weight = model[0].weight.data.fill_(torch.finfo(torch.float32).max)
    refuse_nonfinite(sparsifier.weights)
    weight.view(-1)[2], weight.view(-1)[3] = math.inf, -math.inf
    with pytest.raises(FloatingPointError, match=r"NaN or infinite weights in 0\.weight"):
        refuse_nonfinite(sparsifier.weights)
