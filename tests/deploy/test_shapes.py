"""Shapes without torch: wherever a rule answers, torch says the same."""

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from optg.deploy.graph import dry_run
from optg.deploy.operations import resolve
from optg.deploy.shapes import RULES, shape_of
from tests.deploy.nets import captured


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def arguments(op: str, chance: random.Random) -> list[Any]:
    """Arguments for an operation that fit together, mostly."""
    few, pick = (lambda *more: chance.choice((1, 2, 3, *more))), chance.choice
    image = meta(few(0), few(4) * 2, few(5, 9, 12), few(5, 9, 12))
    channels = image.shape[1]
    if op == "aten.conv2d.default":
        groups, outputs = pick((1, 2, channels)), few() * pick((1, 2, channels))
        weight = meta(outputs, channels // groups, few(5), few())
        sizes = [[few(), few()], [pick((0, 1, 2)), few()], [pick((1, 1, 2)), 1]]
        return [image, weight, pick((None, meta(outputs))), *sizes, groups][: pick((2, 3, 4, 5, 6, 7, 7, 7))]
    if op == "aten.batch_norm.default":
        norm = [pick((None, meta(channels))), meta(channels), meta(channels), pick((meta(channels), meta(channels), None))]
        return [image, *norm, pick((False, False, True)), 0.1, 1e-5, False]
    if op == "aten.max_pool2d.default":
        return [image, [few(), few()], pick(([], [few(), few()], [2, 2])), [pick((0, 1))] * 2, [pick((1, 1, 2)), 1]]
    if op == "aten.adaptive_avg_pool2d.default":
        return [image, [few(), pick((0, 1, 7))]]
    if op == "aten.linear.default":
        return [pick((meta(4, channels), meta(2, 3, channels), meta(channels))), meta(3, channels), pick((None, meta(3)))]
    if op == "aten.flatten.using_ints":
        return [image, pick((0, 1, 2, 3, -2)), pick((-1, 0, 1, 2, 3, 4))]
    if op.endswith(".Tensor"):
        other = [pick((n, n, n, 1)) for n in image.shape][pick((0, 0, 0, 1)) :]
        return [image, pick((meta(*image.shape), meta(*image.shape), meta(*other), meta(*other, dtype=torch.float64), 2.0))]
    return [image]


def changed(args: list[Any], chance: random.Random) -> list[Any]:
    """One argument is another."""
    at, args = chance.randrange(len(args)), list(args)
    shape = [chance.choice((0, 1, 2, 3, 8)) for _ in range(chance.randrange(6))]
    args[at] = chance.choice((meta(*shape), [2, 2], [1], 0, -1, 3, None, True, [0, 1], [-1, 1], meta(3, 3, dtype=torch.int64)))
    return args


@pytest.mark.parametrize("op", RULES)
def test_a_rule_says_what_torch_says_or_nothing(op: str) -> None:
    chance, answers = random.Random(0), 0
    for turn in range(600):
        args = arguments(op, chance)
        args = changed(args, chance) if turn % 3 == 0 else args
        found = shape_of(op, args, {})
        if found is not None:
            expected = resolve(op)(*args)
            assert (found.shape, found.dtype) == (expected.shape, expected.dtype), args
            answers += 1
    assert answers > 100


@pytest.mark.parametrize("name", ["vgg19", "resnet50", "mobilenet_v1"])
def test_whole_networks_have_the_shapes_that_torch_tells(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = dry_run(captured(name), batch=3)
    monkeypatch.setattr("optg.deploy.graph.shape_of", lambda *_: None)
    torchs = dry_run(captured(name), batch=3)
    assert {n: v.shape for n, v in ours.items()} == {n: v.shape for n, v in torchs.items()}
