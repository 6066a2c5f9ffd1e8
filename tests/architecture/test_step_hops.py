"""A reader can follow one training step: it passes through few files of ours."""

import sys
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn

import optg

ROOT = Path(optg.__file__).parent
MAX_FILES = 8


def calls_of_ours(run: Any) -> list[tuple[str, str]]:
    """Return the (file, function) of each call into optg/ while `run` runs, in order."""
    calls: list[tuple[str, str]] = []

    def profile(frame: FrameType, event: str, _: object) -> None:
        file = Path(frame.f_code.co_filename)
        if event == "call" and file.is_relative_to(ROOT):
            calls.append((file.relative_to(ROOT).as_posix(), frame.f_code.co_qualname))

    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        run()
    finally:
        sys.setprofile(before)
    return calls


def test_a_step_without_a_cut_enters_few_files() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optg.sparsify(model, optimizer, method="optg", sparsity=0.5, epochs=4, steps_per_epoch=10)  # cuts at steps 10, 20, 30
    for _ in range(15):
        optimizer.zero_grad()
        model(torch.randn(4, 8)).square().sum().backward()
        optimizer.step()
    optimizer.zero_grad()
    model(torch.randn(4, 8)).square().sum().backward()
    calls = calls_of_ours(optimizer.step)
    assert calls
    hops = [call for i, call in enumerate(calls) if i == 0 or calls[i - 1][0] != call[0]]
    print(f"{len(calls)} calls, {len(hops)} hops between files:")
    print("\n".join(f"  {file}: {function}" for file, function in hops))
    files = {file for file, _ in calls}
    assert len(files) <= MAX_FILES, sorted(files)
