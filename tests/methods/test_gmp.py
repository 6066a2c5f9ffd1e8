"""GMP: its cubic schedule and magnitude cuts."""

from dataclasses import replace

import torch
from torch import nn

import optg
from optg.core.clock import Clock
from optg.methods import GMP


def test_cuts_rise_on_the_cubic_and_stop_at_its_end():
    method, clock = GMP(every=10, end=0.5), Clock(10, 10)
    weights = type("Weights", (), {"target": 0.8})()
    cuts = {}
    for clock.step in range(101):
        if method.due(clock):
            cuts[clock.step] = round(method.sparsity(weights, clock), 6)
    # 0.8 · (1 − (1 − t / 50)³)
    assert cuts == {10: 0.3904, 20: 0.6272, 30: 0.7488, 40: 0.7936, 50: 0.8}


def test_a_run_shorter_than_the_period_still_has_a_last_cut():
    for epochs, steps in ((1, 1), (1, 7), (3, 5), (1, 99)):
        method, clock = GMP(), Clock(epochs, steps)
        due = []
        for clock.step in range(clock.total + 1):
            if method.due(clock):
                due.append(clock.step)
        assert due == [method.last_cut(clock)] and 1 <= due[0] <= clock.total


def test_the_smallest_magnitudes_are_removed_for_good():
    model = nn.Linear(4, 1, bias=False)
    model.weight.data = torch.tensor([[0.1, -4.0, 0.3, 2.0]])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    sparsifier = optg.sparsify(model, optimizer, GMP(every=1, schedule="constant"), sparsity=0.5, epochs=2, steps_per_epoch=10)
    seen = []
    for _ in range(20):
        model(torch.ones(4)).mul(-1.0).backward()  # pushes every weight up
        optimizer.step()
        seen.append(sparsifier.masks["weight"].tolist())
        assert model.weight[0, 0] == model.weight[0, 2] == 0
    assert seen == [[[False, True, False, True]]] * 20


def test_no_cut_is_made_before_the_start():
    clock = Clock(epochs=2, steps_per_epoch=100)
    method = GMP(start=0.55, end=0.6, every=100)
    assert [s for s in range(200) if method.due(replace(clock, step=s))] == [120]
