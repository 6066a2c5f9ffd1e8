"""Shape rules: wherever a rule applies, it agrees with torch."""

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from optg.deploy.graph import dry_run, resolve
from optg.deploy.graph.shapes import RULES, shape_of
from tests.deploy.nets import captured


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def random_arguments(op: str, rng: random.Random) -> list[Any]:
    """Draw arguments for an operation; most of them are valid."""
    few, pick = (lambda *more: rng.choice((1, 2, 3, *more))), rng.choice
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
    if op == "optg.dequantize_s8.default":
        return [meta(6, few(), dtype=torch.int8), meta(pick((6, 6, 6, 1, 3)))]
    if op.startswith("optg."):
        dtype = torch.uint8 if "dequantize" in op else torch.float32
        return [meta(*image.shape, dtype=pick((dtype, dtype, torch.float64))), 0.5, pick((0, 3, 255))]
    if op.endswith(".Tensor"):
        other = [pick((n, n, n, 1)) for n in image.shape][pick((0, 0, 0, 1)) :]
        return [image, pick((meta(*image.shape), meta(*image.shape), meta(*other), meta(*other, dtype=torch.float64), 2.0))]
    return [image]


def replace_one(args: list[Any], rng: random.Random) -> list[Any]:
    """Replace one argument by an arbitrary value."""
    at, args = rng.randrange(len(args)), list(args)
    shape = [rng.choice((0, 1, 2, 3, 8)) for _ in range(rng.randrange(6))]
    args[at] = rng.choice((meta(*shape), [2, 2], [1], 0, -1, 3, None, True, [0, 1], [-1, 1], meta(3, 3, dtype=torch.int64)))
    return args


@pytest.mark.parametrize("op", RULES)
def test_rule_agrees_with_torch_or_returns_none(op: str) -> None:
    rng, answers = random.Random(0), 0
    for turn in range(600):
        args = random_arguments(op, rng)
        args = replace_one(args, rng) if turn % 3 == 0 else args
        found = shape_of(op, args, {})
        if found is not None:
            expected = resolve(op)(*args)
            assert (found.shape, found.dtype) == (expected.shape, expected.dtype), args
            answers += 1
    assert answers > 100


@pytest.mark.parametrize("name", ["vgg19", "resnet50", "mobilenet_v1"])
def test_shapes_of_whole_networks_agree_with_torch(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = dry_run(captured(name), batch=3)
    monkeypatch.setattr("optg.deploy.graph.interpret.shape_of", lambda *_: None)
    expected = dry_run(captured(name), batch=3)
    assert {n: v.shape for n, v in ours.items()} == {n: v.shape for n, v in expected.items()}
