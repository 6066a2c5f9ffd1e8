"""Timing: engines take turns, and wrong or failing ones are reported."""

import pytest
import torch

from optg.deploy.bench import measure as measure_module
from optg.deploy.bench.engines import ENGINES, Engine, EngineInputs, Network, prepare_torch
from optg.deploy.bench.measure import MeasureRequest, measure, time_in_turns
from optg.deploy.bench.subject import Subject


def test_failing_wrong_and_missing_engines_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(inputs: EngineInputs) -> Network:
        raise RuntimeError("no such instruction\nand more")

    def wrong(inputs: EngineInputs) -> Network:
        return lambda images: 1.5 * inputs.model(images)

    engines = (
        Engine("torch", prepare_torch),
        Engine("fails", fails),
        Engine("wrong", wrong),
        Engine("absent", fails, ("no_such",)),
    )
    monkeypatch.setattr("optg.deploy.bench.engines.ENGINES", engines)
    monkeypatch.setattr(measure_module, "MIN_ROUNDS", 2)
    timings, notes = measure(MeasureRequest(Subject("digits"), [], [2], 1, 0.01))
    assert [t.engine for t in timings] == ["torch", "wrong"]
    assert timings[0].difference == 0 and timings[1].difference == pytest.approx(0.5)
    assert notes == [
        "absent is not installed: pip install no_such",
        "fails failed at batch 2: RuntimeError: no such instruction",
    ]


TOLERANCES = {"bf16": 0.05, "int8": 0.2}  # of engines that round activations; others: 1e-5


@pytest.mark.parametrize("engine", [e for e in ENGINES if e.packages and "nncf" not in e.packages], ids=lambda e: e.name)
def test_other_engines_agree_with_torch(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    for package in engine.packages:
        pytest.importorskip(package)
    monkeypatch.setattr(measure_module, "MIN_ROUNDS", 1)
    (found,), notes = measure(MeasureRequest(Subject("digits"), [engine.name], [3], 1, 0.01))
    assert found.difference < TOLERANCES.get(engine.name[-4:], 1e-5) and not notes


def test_every_engine_gets_one_turn_per_round(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    def network(name: str) -> Network:
        def call(images: torch.Tensor) -> torch.Tensor:
            calls.append(name)
            return images

        return call

    monkeypatch.setattr(measure_module, "time_one_turn", lambda network, images: [float(network(images).sum())])
    images = torch.ones(2, 3)
    timings = list(time_in_turns({n: network(n) for n in "abc"}, images, images, 1, 0.0))
    rounds = [calls[i : i + 3] for i in range(0, 3 * measure_module.MIN_ROUNDS, 3)]
    assert all(sorted(r) == ["a", "b", "c"] for r in rounds) and len({tuple(r) for r in rounds}) > 1
    assert [(t.engine, t.milliseconds, t.calls) for t in timings] == [(n, 6.0, measure_module.MIN_ROUNDS) for n in "abc"]
