"""A step that Ctrl-C interrupts, at any line of optg's code."""

import math
import sys
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

import optg
from optg.methods import GMP, IMP, ST3, OptG, RigL
from tests.toy import EPOCHS, STEPS, batches, entropy, sparse_convnet, step

OURS = str(optg.__path__[0])
GRAD_MODE = torch.autograd.grad_mode.__file__


class InterruptAt:
    """A trace function that raises KeyboardInterrupt before the n-th line of optg, or of a grad mode that optg enters."""

    def __init__(self, line: int) -> None:
        self.line, self.seen = line, 0

    def __call__(self, frame: FrameType, event: str, arg: Any) -> Callable[..., Any] | None:
        if event == "line" and is_ours(frame):
            self.seen += 1
            if self.seen == self.line:
                sys.settrace(None)
                raise KeyboardInterrupt
        return self


def is_ours(frame: FrameType | None) -> bool:
    """Return whether a frame belongs to optg, or to a grad mode that optg entered."""
    while frame and frame.f_code.co_filename in (GRAD_MODE, torch.utils._contextlib.__file__):
        frame = frame.f_back
    return frame is not None and frame.f_code.co_filename.startswith(OURS)


METHODS = {
    "optg": OptG,
    "gmp": partial(GMP, every=2, schedule="linear"),
    "imp": partial(IMP, fraction=0.7),
    "st3": ST3,
    "rigl": partial(RigL, every=2),
}


def start(method: str, steps: int) -> tuple[nn.Module, torch.optim.Optimizer, optg.Sparsifier]:
    """Return a model that has taken so many steps, and has gradients for the next one."""
    model, optimizer, sparsifier = sparse_convnet(METHODS[method]())
    *before, last = batches(steps + 1)
    for batch in before:
        step(model, optimizer, batch)
    optimizer.zero_grad()
    entropy(model, last).backward()
    return model, optimizer, sparsifier


def steps_before_a_cut(method: str) -> int:
    """Return after how many steps the next one changes the mask for the second time: some weights are removed already."""
    model, optimizer, sparsifier = start(method, 0)
    changes = 0
    for steps, batch in enumerate(batches(EPOCHS * STEPS)):
        masks = [mask.clone() for mask in sparsifier.masks.values()]
        step(model, optimizer, batch)
        changes += not all(map(torch.equal, masks, sparsifier.masks.values()))
        if changes == 2:
            return steps
    raise AssertionError(f"{method} changed its mask less than twice")


def interrupted(method: str) -> Iterator[optg.Sparsifier]:
    """Interrupt a step that changes the mask, at one line after the other."""
    steps, line, seen = steps_before_a_cut(method), 0, 1
    while seen > line:
        line += 1 if line < 30 else 5  # all lines would take a minute
        _, optimizer, sparsifier = start(method, steps)
        interrupt = InterruptAt(line)
        sys.settrace(interrupt)
        try:
            optimizer.step()
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(None)
        seen = interrupt.seen + 1
        yield sparsifier


@pytest.mark.parametrize("method", METHODS)
def test_an_interrupted_step_restores_the_grad_mode_and_counts_what_it_removed(method):
    half_done = 0
    for sparsifier in interrupted(method):
        was_enabled = torch.is_grad_enabled()
        torch.set_grad_enabled(True)
        assert was_enabled
        stale = zeros_of(sparsifier.weights.masks) != sparsifier.weights.counts[:, 0].tolist()
        half_done += stale
        kept = [layer.kept for layer in sparsifier.layers()]
        assert kept == [int(mask.sum()) for mask in sparsifier.masks.values()]
        assert sparsifier.sparsity == pytest.approx(1 - sum(kept) / sum(layer.weights for layer in sparsifier.layers()))
    assert half_done or method == "rigl"  # some lines lie between new masks and their counts; RigL's counts stay the same


def zeros_of(masks: list[torch.Tensor]) -> list[int]:
    return [int((~mask).sum()) for mask in masks]


def test_finish_reaches_the_target_after_an_interrupted_cut():
    for sparsifier in interrupted("imp"):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            sparsifier.finish()
        size = sum(layer.weights for layer in sparsifier.layers())
        assert sum(zeros_of(sparsifier.weights.masks)) == math.ceil(0.9 * size)
