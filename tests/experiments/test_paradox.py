"""The independence paradox, on problems small enough to check by hand, and the `optg paradox` command."""

import copy
import dataclasses
import json
import math

import pytest
import torch
from torch import nn

from optg.experiments.paradox import criteria
from optg.experiments.paradox.command import Paradox, default_counts, paradox
from optg.experiments.paradox.measure import MeasuredModel, measure
from tests.toy import batches, convnet, entropy


def linear_model(*weights: float) -> nn.Linear:
    model = nn.Linear(len(weights), 1, bias=False)
    model.weight.data[:] = torch.tensor([weights])
    return model


def squared_error(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return (model(batch[0]).squeeze(1) - batch[1]).square().mean()


def measure_rows(subject, criteria_by_name, counts, training=(), steps=0, lr=0.1, samples=8):
    def endless():
        while True:
            yield from training

    wanted = [(name, criterion, count) for name, criterion in criteria_by_name.items() for count in counts]
    return list(measure(subject, wanted, endless, steps=steps, lr=lr, samples=samples, seed=0))


def test_two_weights_that_replace_each_other():
    """L = (w₁ + w₂ − 2)² at w = (1, 1): without one of them L is 1, without both it is 4, and the gradient predicts 0."""
    subject = MeasuredModel(linear_model(1, 1), squared_error, [(torch.ones(1, 2), torch.tensor([2.0]))])
    one, both = measure_rows(subject, {"snip": criteria.snip}, [1, 2])
    assert (one.loss, one.predicted, one.true, one.alone, one.among, one.gap) == (0, 0, 1, 1, 1, 0)
    assert (both.predicted, both.true) == (0, 4)
    assert (both.alone, both.among, both.gap) == (1, 3, 2)  # Eq. 7: 1 − 0; Eq. 8: 4 − 1
    assert both.tuned is None and both.share == 1


def test_training_the_remaining_weight_makes_up_for_the_removed_one():
    data = [(torch.ones(1, 2), torch.tensor([2.0]))]
    [one] = measure_rows(
        MeasuredModel(linear_model(1, 1), squared_error, data), {"snip": criteria.snip}, [1], data, steps=300, lr=0.05
    )
    assert one.true == 1 and abs(one.tuned) < 1e-6
    assert one.among == pytest.approx(1)  # before the weight is removed, the whole model is trained


def test_the_effect_of_training_the_whole_model_does_not_count():
    """One input has two targets, so training brings L to 1 at best, with or without the removed weight."""
    data = [(torch.ones(2, 2), torch.tensor([1.0, 3.0]))]
    [one] = measure_rows(
        MeasuredModel(linear_model(1, 2), squared_error, data), {"snip": criteria.snip}, [1], data, steps=300, lr=0.05
    )
    assert one.loss == 2 and abs(one.tuned) < 1e-6


def test_independent_weights_have_no_gap():
    """Each weight has its own input, so L is a sum over weights and removing one does not affect another."""
    data = [(torch.eye(4), torch.tensor([1.0, -2.0, 3.0, 0.5]))]
    subject = MeasuredModel(linear_model(0.3, -1.0, 2.0, 4.0), squared_error, data)
    for row in measure_rows(subject, {"snip": criteria.snip, "magnitude": criteria.magnitude}, [1, 2, 4]):
        assert row.gap == pytest.approx(0, abs=1e-12) and row.alone == pytest.approx(row.among)


def test_the_error_of_the_prediction_for_one_weight_is_its_curvature_term():
    torch.manual_seed(0)
    x, y = torch.randn(32, 5), torch.randn(32)
    model = linear_model(*torch.randn(5).tolist())
    subject = MeasuredModel(model, squared_error, [(x, y)])
    hessian = 2 * (x.double().T @ x.double()) / 32
    for i, w in enumerate(subject.original[0][0]):
        mask = torch.ones(1, 5, dtype=torch.bool)
        mask[0, i] = False
        predicted, true = subject.predicted_change([mask]), subject.true_change([mask])
        assert true - predicted == pytest.approx(float(hessian[i, i] * w * w / 2), rel=1e-9)
    tiny = linear_model(1.0, 1e-5)
    subject = MeasuredModel(tiny, squared_error, [(torch.randn(8, 2), torch.randn(8))])
    mask = torch.tensor([[True, False]])
    assert subject.predicted_change([mask]) == pytest.approx(subject.true_change([mask]), rel=1e-3)


def test_the_prediction_is_minus_the_sum_of_gradient_times_weight():
    torch.manual_seed(0)
    model, data = convnet().double(), batches(3, dtype=torch.float64)
    subject = MeasuredModel(model, entropy, data)
    reference = copy.deepcopy(model)
    (sum(entropy(reference, batch) for batch in data) / 3).backward()
    layers = [p for p in reference.parameters() if p.ndim > 1]
    for name in ("snip", "taylor", "magnitude", "loss_change"):
        for count in (1, 100, 1500):
            masks = getattr(criteria, name)(subject, count)
            assert sum(int((~mask).sum()) for mask in masks) == count
            expected = -sum((p.grad * p.detach())[~mask].sum() for p, mask in zip(layers, masks))
            assert subject.predicted_change(masks) == pytest.approx(float(expected), rel=1e-9, abs=1e-12)


def test_each_criterion_removes_the_weights_with_its_lowest_scores():
    """w = (1, −2, 0, 3, 0.5) and g = (0.1, 0.2, 9, −0.1, 4): −g·w = (−0.1, 0.4, 0, 0.3, −2); the third weight is already 0."""
    subject = MeasuredModel(linear_model(1, -2, 0, 3, 0.5), squared_error, [(torch.ones(1, 5), torch.zeros(1))])
    subject.gradient = [torch.tensor([[0.1, 0.2, 9.0, -0.1, 4.0]], dtype=torch.float64)]
    subject.squares = [(subject.gradient[0] * subject.original[0]).square()]
    assert subject.size == 4

    def removed(criterion, count):
        return (~criterion(subject, count)[0][0]).nonzero().flatten().tolist()

    assert removed(criteria.loss_change, 1) == [4] and removed(criteria.loss_change, 2) == [0, 4]
    assert removed(criteria.snip, 2) == [0, 3] and removed(criteria.taylor, 2) == [0, 3]
    assert removed(criteria.magnitude, 2) == [0, 4]
    assert removed(criteria.saved_scores([torch.tensor([[5.0, 1.0, -9.0, 2.0, 7.0]])]), 2) == [1, 3]
    assert removed(criteria.random(0), 3) == removed(criteria.random(0), 3) and 2 not in removed(criteria.random(0), 4)


def test_learned_scores_account_for_the_other_removed_weights():
    """L = (w₁ + w₂ + w₃ − 2)² at (1.2, 1.2, 0.6), where L = 1. Removing any one weight is predicted to lower L, the large
    ones most. But without both large ones L is 1.96, and without a large and the small one it is 0.64."""
    data = [(torch.ones(1, 3), torch.tensor([2.0]))]
    subject = MeasuredModel(linear_model(1.2, 1.2, 0.6), squared_error, data)

    def training_batches():
        while True:
            yield from data

    optg = criteria.accumulated_scores(training_batches, steps=64, rounds=8)
    greedy, learned = (measure_rows(subject, {"": c}, [2])[0] for c in (criteria.loss_change, optg))
    assert greedy.predicted < learned.predicted < 0
    assert greedy.true == pytest.approx(0.96, abs=1e-6) and learned.true == pytest.approx(-0.36, abs=1e-6)
    assert optg(subject, 1)[0].tolist() == [[False, True, True]]  # the one whose removal is predicted to help most


@pytest.mark.parametrize("steps", [1, 10, 64])
def test_scores_are_learned_in_the_given_number_of_steps(steps):
    data, seen = [(torch.ones(1, 3), torch.tensor([2.0]))], []

    def training_batches():
        while True:
            seen.append(1)
            yield from data

    criteria.accumulated_scores(training_batches, steps, rounds=8)(
        MeasuredModel(linear_model(1.2, 1.2, 0.6), squared_error, data), 2
    )
    assert len(seen) == steps


def test_the_given_model_is_not_changed():
    model, data = convnet(), batches(2)
    before = {name: t.clone() for name, t in model.state_dict().items()}
    model.train()
    subject = MeasuredModel(model, entropy, data)
    measure_rows(
        subject, {"snip": criteria.snip, "optg": criteria.accumulated_scores(lambda: iter(data * 9), 8, 2)}, [5], data, steps=2
    )
    assert all(t.equal(before[name]) for name, t in model.state_dict().items()) and model.training
    assert all(w.equal(b) for w, b in zip(subject.weights, subject.original))


def test_default_counts_are_powers_of_ten_and_shares():
    assert default_counts(10_000) == [1, 10, 100, 1000, 5000, 9000, 9500, 9900]
    assert default_counts(10) == [1, 5, 9] and default_counts(2) == [1]


SMALL = {"batches": 1, "batch_size": 32, "steps": 1, "samples": 2, "accumulate": 8, "device": "cpu", "counts": (1, 200)}


def test_the_scores_of_a_run_come_from_its_checkpoint(tmp_path, capsys):
    from optg.cli import train

    train.main(["--epochs", "2", "--output", str(tmp_path / "run"), "--device", "cpu"])
    paradox(Paradox(str(tmp_path / "run"), output=tmp_path / "out", criteria=("optg", "snip"), **SMALL))
    said = capsys.readouterr().out
    assert "its checkpoint's scores" in said and "4,878 weights" in said  # 5 % of 97,568
    lines = [json.loads(line) for line in (tmp_path / "out" / "paradox.jsonl").read_text().splitlines()]
    assert [(line["criterion"], line["removed"]) for line in lines] == [("optg", 1), ("optg", 200), ("snip", 1), ("snip", 200)]
    assert lines[0]["options"]["steps"] == 1 and (tmp_path / "out" / "paradox.png").stat().st_size > 10_000
    [checkpoint] = list((tmp_path / "run" / "checkpoints").glob("step-*"))[-1:]
    paradox(Paradox(str(checkpoint), output=tmp_path / "again", criteria=("optg",), **SMALL))
    again = [json.loads(line) for line in (tmp_path / "again" / "paradox.jsonl").read_text().splitlines()]
    assert again[1]["true"] == lines[1]["true"]
    for file in checkpoint.iterdir():
        file.write_bytes(b"damaged")
    capsys.readouterr()
    paradox(Paradox(str(tmp_path / "run"), output=tmp_path / "out", criteria=("snip",), **SMALL))  # needs no checkpoint
    assert "optg" not in capsys.readouterr().out.splitlines()[0].split(":", 1)[1]
    (tmp_path / "run" / "summary.json").write_text("{")
    with pytest.raises(ValueError, match=r"summary\.json is damaged"):
        paradox(Paradox(str(tmp_path / "run"), output=tmp_path / "out", **SMALL))


def test_the_same_command_continues_after_an_interruption(tmp_path, monkeypatch):
    from optg.experiments.paradox import measure as module

    left = 3
    whole = measure

    def counted(*args, **options):
        nonlocal left
        for row in whole(*args, **options):
            yield row
            left -= 1
            if not left:
                raise KeyboardInterrupt

    monkeypatch.setattr(module, "measure", counted)
    options = Paradox("digits", data="digits", output=tmp_path, criteria=("snip", "magnitude"), **SMALL)
    file = tmp_path / "paradox.jsonl"
    with pytest.raises(KeyboardInterrupt):
        paradox(options)
    first = file.read_text().splitlines()
    assert len(first) == 3 and not (tmp_path / "paradox.png").exists()
    left = 2  # only one row is missing
    paradox(options)
    lines = file.read_text().splitlines()
    assert left == 1 and lines[:3] == first and len(lines) == 4 and (tmp_path / "paradox.png").exists()
    left = 9
    paradox(dataclasses.replace(options, samples=3))  # other options: new rows in the same file
    both = file.read_text().splitlines()
    assert left == 5 and both[:4] == lines and [json.loads(line)["options"]["samples"] for line in both[4:]] == [3] * 4
    paradox(dataclasses.replace(options, counts=(1,)))  # already measured
    assert left == 5 and file.read_text().splitlines() == both
    file.write_text("".join(json.dumps({**json.loads(line), "loss": 2.5}) + "\n" for line in lines))  # rows of another model
    others = file.read_text().splitlines()
    paradox(options)
    assert left == 1 and file.read_text().splitlines() == [*others, *lines]
    for damaged in ("damaged", "3", '{"criterion": "snip"}'):
        file.write_text(f"{lines[0]}\n{damaged}\n")
        with pytest.raises(ValueError, match=r"paradox\.jsonl, line 2, is not a row of optg paradox"):
            paradox(options)
        assert file.read_text() == f"{lines[0]}\n{damaged}\n"


def test_any_model_and_data(tmp_path, capsys):
    own = {"data": "tests.training.user_code:data", "output": tmp_path}
    paradox(Paradox("tests.training.user_code:model", criteria=("magnitude", "optg"), **own, **SMALL))
    assert "scores of 8 steps on frozen weights" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"what": "digits"}, "say the data too"),
        ({"what": "digits", "data": "digits", "criteria": ("snap",)}, "did you mean 'snip'"),
        ({"what": "digits", "data": "digits", "counts": (0,)}, "--counts has 0; expected 1 to 97567"),
        ({"what": "digits", "data": "digits", "batches": 0}, "--batches is 0; expected at least 1"),
        ({"what": "digits", "data": "digits", "batches": 999}, "--batches is 999; expected at most 44"),
        ({"what": "digit", "data": "digits"}, "did you mean 'digits'"),
        ({"what": "."}, "the folder of a run"),
        ({"what": "vgg19", "data": "digits"}, r"vgg19 does not accept this data, whose inputs have shape \(1, 8, 8\)"),
        ({"what": "digits", "data": "digits", "lr": math.nan}, "--lr is nan; expected a number above 0"),
        ({"what": "tests.experiments.unusable_models:no_weights", "data": "digits"}, "the model has no prunable weight"),
        ({"what": "tests.experiments.unusable_models:nan_weights", "data": "digits"}, "the loss of .* is nan on this data"),
        (
            {"what": "tests.experiments.unusable_models:zero_weights", "data": "digits"},
            "has 0 nonzero weights; expected at least 2",
        ),
        (
            {"what": "tests.experiments.unusable_models:tuple_output", "data": "digits"},
            "does not accept this data.*must be Tensor, not tuple",
        ),
        (
            {"what": "tests.experiments.unusable_models:too_few_outputs", "data": "digits"},
            "does not accept this data.*out of bounds",
        ),
    ],
)
def test_bad_options_models_and_data_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        paradox(Paradox(**{**SMALL, **options}))
